"""Shapes of benchmark models: the bytes and operations that a token needs at least.

Used by the experiments. Imports nothing; `bench.harness.random_models` makes the models, and a test compares them with
these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with gated feed-forward layers. The embedding is tied to the output head in all of them."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float

    @property
    def num_layer_weights(self) -> int:
        """Elements of all layers' matrices: query, key, value, output, gate, up, down."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Elements of the output head, which is also the embedding."""
        return self.vocab_size * self.hidden_size

    def prefill_flops(self, num_tokens: int) -> int:
        """Operations that a prompt of `num_tokens` needs at least; a multiplication and an addition count as two.

        Every layer's matrices for every token, the output head for the last one, and of attention's two products only
        the half below the diagonal.
        """
        num_pairs = num_tokens * (num_tokens + 1) // 2
        return 2 * self.num_layer_weights * num_tokens + self._attention_flops(num_pairs) + 2 * self.num_head_weights

    def prefix_flops(self, num_cached: int, num_tokens: int) -> int:
        """Operations of the attention of `num_tokens` new tokens to `num_cached` cached ones before them."""
        return self._attention_flops(num_cached * num_tokens)

    def _attention_flops(self, num_pairs: int) -> int:
        return 4 * self.num_layers * self.num_heads * self.head_dim * num_pairs


SHAPES = {
    "qwen2.5-0.5b": ModelShape("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e6),
    "qwen3-0.6b": ModelShape("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e6),
    "qwen3-8b": ModelShape("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, 1e6),
    "m150": ModelShape("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e5),
    "m32": ModelShape("llama", 16384, 512, 1408, 8, 8, 4, 64, 8192, 1e4),
    "tiny": ModelShape("llama", 4096, 256, 704, 4, 4, 2, 64, 8192, 1e4),
}
"""Three models that are much served (Qwen3-8B's own head is not tied; a step reads as many weights either way), one of
SmolLM2-135M's shape, the smallest whose weights (128 MB in float32, 64 MB in bfloat16) fit no usual core's share of
cache, so that its decode steps still wait for memory, and one for trying things out."""
