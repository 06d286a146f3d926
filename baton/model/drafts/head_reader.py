"""Takes the tensors of a drafting head by name, checked against what the target has. Called at load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.model.decoders.lean_spec import ACTIVATIONS, SUPPORTED_ROPES
from baton.model.decoders.lean_weights import GatedFeedForward, LeanModel, Rope
from baton.model.decoders.ops import Activation, HeadShape
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.linears.linear import Linear, make_linear
from baton.model.linears.packing import WeightPacker

OutputHead = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, hidden_size] -> logits [tokens, vocabulary]."""


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """Parts of the target that a head uses. `embedding` [vocab_size, hidden_size] gives dtype and device, too.

    `packer`: of the target's matrices; None: they are plain.
    """

    embedding: torch.Tensor
    output: OutputHead
    num_layers: int
    vocab_size: int
    packer: WeightPacker | None

    @classmethod
    def of(
        cls, impl: torch.nn.Module | LeanModel, num_layers: int, vocab_size: int, packer: WeightPacker | None
    ) -> HeadTarget:
        """Takes them from a loaded model. Raises `UnsupportedModel` for a stock module without a list of layers."""
        if isinstance(impl, LeanModel):
            return cls(impl.embedding, impl.logits, num_layers, vocab_size, packer)
        module: Any = impl
        if not hasattr(module.base_model, "layers"):
            raise UnsupportedModel(f"{type(module).__name__} has no list of layers that a head could read between")
        head = getattr(module, "lm_head", None)
        rows = module.get_input_embeddings().weight.detach()
        return cls(rows, module.get_output_embeddings() if head is None else head, num_layers, vocab_size, packer)


class HeadReader:
    """Takes tensors by name; what is left over at the end is not understood."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: HeadTarget) -> None:
        self.config = config
        self.tensors = dict(tensors)
        self.target = target
        self.hidden_size = self.integer("hidden_size")
        self.num_parameters = 0

    def integer(self, name: str) -> int:
        """A positive number of the config. Raises `UnreadableModel` for anything else."""
        value = self.config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnreadableModel(f"the head's {name} is {value!r}")
        return value

    def heads(self) -> HeadShape:
        """The shape of its attention."""
        num_heads = self.integer("num_attention_heads")
        head_dim = int(self.config.get("head_dim") or self.hidden_size // num_heads)
        return HeadShape(num_heads, int(self.config.get("num_key_value_heads") or num_heads), head_dim)

    def activation(self) -> Activation:
        """The feed-forward part's. Raises `UnsupportedModel` for one that is not computed here."""
        name = self.config.get("hidden_act", "silu")
        if name not in ACTIVATIONS:
            raise UnsupportedModel(f"the head's activation is {name}")
        return ACTIVATIONS[name]

    def qkv(self, layer: str, heads: HeadShape, num_in: int) -> Linear:
        """The fused projections of attention."""
        sizes = tuple(count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))
        return self.fused([f"{layer}.self_attn.{side}_proj" for side in "qkv"], sizes, num_in)

    def feed_forward(self, layer: str) -> GatedFeedForward:
        """The gated feed-forward part."""
        inner = self.tensors[f"{layer}.mlp.down_proj.weight"].shape[1]
        both = self.fused([f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], (inner, inner), self.hidden_size)
        return GatedFeedForward(both, self.linear(f"{layer}.mlp.down_proj", self.hidden_size, inner))

    def rope(self) -> Rope:
        """The rotary embedding, computed by transformers."""
        from transformers import LlamaConfig  # slow to import
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        stock = LlamaConfig.from_dict(dict(self.config))
        kind = (stock.rope_parameters or {}).get("rope_type", "default")
        if kind not in SUPPORTED_ROPES:
            raise UnsupportedModel(f"the head's rotary scaling is {kind}")
        rotary: Any = LlamaRotaryEmbedding(stock)
        device = self.target.embedding.device
        return Rope(rotary.inv_freq.float().to(device), float(rotary.attention_scaling))

    def norm(self, name: str) -> torch.Tensor:
        """A norm's factors, float32."""
        weight = self.take(f"{name}.weight", (self.hidden_size,))
        return weight.to(self.target.embedding.device).float().contiguous()

    def linear(self, name: str, num_out: int, num_in: int) -> Linear:
        """One matrix."""
        return self.fused([name], (num_out,), num_in)

    def fused(self, names: list[str], sizes: tuple[int, ...], num_in: int) -> Linear:
        """One matrix over the outputs of all names. Biases are used where the head has them."""
        weights = [self.take(f"{name}.weight", (size, num_in)) for name, size in zip(names, sizes, strict=True)]
        given = [(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)]
        biases = [self.take(name, (size,)) if name in self.tensors else None for name, size in given]
        present = [bias for bias in biases if bias is not None]
        if len(present) not in (0, len(names)):
            raise UnsupportedModel(f"only some of {', '.join(names)} have a bias")
        return self.make(torch.cat(weights), torch.cat(present) if present else None)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A matrix in the target's dtype, packed as the target's are."""
        linear = make_linear(self.placed(weight), None if bias is None else self.placed(bias))
        self.num_parameters += weight.numel()
        if self.target.packer is not None:
            linear.pack(self.target.packer)
        return linear

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, which is then not left over. Raises `KeyError`, and `UnsupportedModel` for another shape."""
        tensor = self.tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"the head's {name} is {tuple(tensor.shape)}, and {shape} would fit the model")
        return tensor

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the target's dtype and on its device."""
        return tensor.to(self.target.embedding.device, self.target.embedding.dtype).contiguous()

    def refuse_leftovers(self) -> None:
        """Raises `UnsupportedModel` if a tensor was not taken."""
        if self.tensors:
            raise UnsupportedModel(f"the head has {min(self.tensors)}, which is not computed here")
