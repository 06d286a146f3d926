"""The layout of a KV page, which is part of a worker's fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.domain.fingerprint import digest_of

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Cache of one layer. K is [num_kv_heads, page_size, k_head_dim] inside a page (HND), V likewise."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int

    @property
    def num_elements_per_token(self) -> int:
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Page-major across layers: a page is all layers' K and V for `page_size` tokens, contiguous, layer by layer."""

    layers: tuple[LayerGeometry, ...]
    dtype: str
    page_size: int
    layout: str = "page-major/HND"

    @property
    def num_bytes_per_token(self) -> int:
        return sum(layer.num_elements_per_token for layer in self.layers) * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.num_bytes_per_token * self.page_size

    def layer_offsets(self) -> list[tuple[int, int]]:
        """Element offsets of K and V inside a page, for each layer."""
        offsets, at = [], 0
        for layer in self.layers:
            k_elements = layer.num_kv_heads * layer.k_head_dim * self.page_size
            offsets.append((at, at + k_elements))
            at += layer.num_elements_per_token * self.page_size
        return offsets

    def num_pages(self, num_tokens: int) -> int:
        """Pages needed for `num_tokens` token slots."""
        return ceil_div(num_tokens, self.page_size)

    def parts(self) -> dict[str, str]:
        """Named parts of a fingerprint (`baton.domain.fingerprint`). They cover every field."""
        shapes = (f"{layer.num_kv_heads}x{layer.k_head_dim}+{layer.v_head_dim}" for layer in self.layers)
        return {
            "dtype": self.dtype,
            "layers": f"{len(self.layers)}, digest {digest_of(shapes)}",
            "layout": self.layout,
            "page_size": str(self.page_size),
        }
