"""The layout of a KV page. Two workers can exchange pages iff their fingerprints of geometry and weights are equal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from baton.domain.arithmetic import ceil_div

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

    def fingerprint(self, weights: str) -> str:
        """Canonical JSON of every field and the weights' name."""
        return json.dumps({**asdict(self), "weights": weights}, sort_keys=True, separators=(",", ":"))


def describe_difference(ours: str, theirs: str) -> str | None:
    """Description of the first field that differs between two fingerprints; None if they are equal."""
    if ours == theirs:
        return None
    try:
        mine, other = json.loads(ours), json.loads(theirs)
    except ValueError:
        return "fingerprint: not readable"
    if not isinstance(mine, dict) or not isinstance(other, dict):
        return "fingerprint: not readable"
    for field in sorted({*mine, *other}):
        if mine.get(field) != other.get(field):
            return f"{field}: {_short(mine.get(field))} here, {_short(other.get(field))} there"
    return "fingerprint: differs"


def _short(value: object) -> str:
    text = f"{len(value)} entries, first {value[0]}" if isinstance(value, list) and value else str(value)
    return text[:120]
