"""Page format 2: the layout of a KV page, which is part of a worker's fingerprint.

    for each head group: for each attention layer: K[heads of the group][slot][dim] V[heads of the group][slot][dim]
    replicated part: latent layers [slot][rank + rope_dim] | draft layers | 8-bit scales | tail
    zeros up to a multiple of 4 KiB
    window part: for each layer with a sliding window: K[heads][slot][dim] V[heads][slot][dim]
    zeros up to a multiple of 4 KiB

One head group is page-major across layers (HND inside a layer), as many groups as KV heads is head-major. A group is a
contiguous range, so that ranks of tensor parallelism can each give or take theirs. The replicated part has the layers
of multi-head latent attention (MLA). Zeros are never written again, so equal pages have equal bytes.

Pages of int8 hold each head's K and V of a token as bytes with a float32 scale. The scales follow the order of the
layers: for each, K [heads][slot], V [heads][slot].

A model has a window part if some of its layers, not all, have a sliding window. It comes last, so that all that a page
far before the end of a sequence is read for is one range. Pages of int8 and of several head groups have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.domain.arithmetic import ceil_div
from baton.domain.fingerprint import PAGE_FORMAT, digest_of
from baton.domain.ids import PageId

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INT8 = "int8"
"""A `kv_dtype`: 8-bit integers with a scale for each token, head and side."""
SCALE_BYTES = 4
FORMAT_VERSION = 2
PAGE_ALIGNMENT = 4096
"""Bytes. Attention over pages off such an edge takes 5 to 8 % longer."""
ALL_LAYERS = "full"
"""Name of the page group of layers that keep every position."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Cache of one attention layer: K is [heads of a group, page_size, k_head_dim] inside a head group, V likewise."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int

    @property
    def num_elements_per_token(self) -> int:
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim)

    @property
    def slot_strides(self) -> tuple[int, int]:
        """Elements from one slot of a head to the next: of K, and of V."""
        return self.k_head_dim, self.v_head_dim

    def __str__(self) -> str:
        return f"{self.num_kv_heads}x{self.k_head_dim}+{self.v_head_dim}"


@dataclass(frozen=True, slots=True)
class LatentGeometry:
    """Cache of one layer that keeps a compressed latent and one rotated key for all heads: [page_size, rank + rope].

    Attention sees one KV head whose K is the whole row, and whose V is its first `rank` elements.
    """

    rank: int
    rope_dim: int

    @property
    def num_elements_per_token(self) -> int:
        return self.rank + self.rope_dim

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def k_head_dim(self) -> int:
        return self.rank + self.rope_dim

    @property
    def v_head_dim(self) -> int:
        return self.rank

    @property
    def slot_strides(self) -> tuple[int, int]:
        """Elements from one slot to the next, for K and V alike: V lies in K."""
        return self.k_head_dim, self.k_head_dim

    def __str__(self) -> str:
        return f"latent {self.rank}+{self.rope_dim}"


CacheLayer = LayerGeometry | LatentGeometry


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that share pages.

    - `head_groups`: contiguous parts that a page is cut into by KV heads. It divides every layer's `num_kv_heads`.
    - `draft_layers`: layers of a drafter, whole in the replicated part.
    - `scale_bytes`: bytes a page for the scales of 8-bit values.
    - `tail_elements`: elements a page for the features of the last filled slot.
    - `window_layers`: numbers of the layers in the window part, ascending. `window`: positions that the widest of them
      attends to; None: there is no window part.

    Raises `ValueError` for head groups that do not divide the heads, and for a window part beside what excludes one.
    """

    name: str
    window: int | None
    layers: tuple[CacheLayer, ...]
    head_groups: int = 1
    draft_layers: tuple[LayerGeometry, ...] = ()
    scale_bytes: int = 0
    tail_elements: int = 0
    window_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.window_layers and (self.window is None or self.head_groups > 1 or self.scale_bytes):
            raise ValueError("a window part needs a window, one head group and no scales")
        for layer in self.attention_layers:
            if self.head_groups < 1 or layer.num_kv_heads % self.head_groups:
                raise ValueError(
                    f"{self.head_groups} KV head groups do not divide the {layer.num_kv_heads} KV heads of a layer"
                )

    @property
    def attention_layers(self) -> tuple[LayerGeometry, ...]:
        """The layers with KV heads: those in the head groups, and those of the window part."""
        return tuple(layer for layer in self.layers if isinstance(layer, LayerGeometry))

    @property
    def sharded_elements_per_token(self) -> int:
        """Elements a token in all head groups together."""
        return sum(layer.num_elements_per_token for layer in self.attention_layers) - self.window_elements_per_token

    @property
    def window_elements_per_token(self) -> int:
        """Elements a token in the window part."""
        return sum(self.layers[number].num_elements_per_token for number in self.window_layers)

    @property
    def replicated_elements_per_token(self) -> int:
        """Elements a token in the replicated part."""
        latent = sum(layer.num_elements_per_token for layer in self.layers if isinstance(layer, LatentGeometry))
        return latent + sum(layer.num_elements_per_token for layer in self.draft_layers)

    def describe(self) -> str:
        """The group as short text that names or digests every field but `head_groups`."""
        layers = (str(layer) for layer in (*self.layers, "draft", *self.draft_layers))
        window = "all positions" if self.window is None else f"window {self.window}"
        if self.window_layers:  # else the text is that of workers without window parts
            window += f" in layers {','.join(map(str, self.window_layers))}"
        shape = digest_of((*layers, str(self.scale_bytes), str(self.tail_elements)))
        return f"{self.name}, {window}, {len(self.layers)} layers, digest {shape}"


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The pages of a model. `dtype`: of what it computes; `kv_dtype`: of the stored elements, None: the same.

    Raises `ValueError` for another number of page groups than one: more are not served yet.
    """

    dtype: str
    page_size: int
    groups: tuple[PageGroup, ...]
    version: int = FORMAT_VERSION
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if len(self.groups) != 1:
            raise ValueError(f"a pool has pages of one group of layers, not of {len(self.groups)}")
        if self.kv_dtype not in (None, INT8):
            raise ValueError(f"pages hold the model's numbers or {INT8}, not {self.kv_dtype}")

    @classmethod
    def of_layers(cls, layers: tuple[CacheLayer, ...], dtype: str, page_size: int, head_groups: int = 1) -> KVGeometry:
        """Pages of one group with all `layers`."""
        return cls(dtype, page_size, (PageGroup(ALL_LAYERS, None, layers, head_groups),))

    def quantized(self) -> KVGeometry:
        """The same layers in pages of int8. Raises `ValueError` for layers that keep latents, and for draft layers."""
        group = self.group
        if len(group.attention_layers) != len(group.layers):
            raise ValueError("a latent and its rotated key would share a scale")
        if group.draft_layers or group.tail_elements:
            raise ValueError("draft layers have no scales")
        num_scales = 2 * self.page_size * sum(layer.num_kv_heads for layer in group.layers)
        whole = self.without_window_part().group
        return replace(self, groups=(replace(whole, scale_bytes=num_scales * SCALE_BYTES),), kv_dtype=INT8)

    def with_window_part(self, window: int, layers: tuple[int, ...]) -> KVGeometry:
        """The same layers, those with the numbers `layers` in a window part. `window`: of the widest."""
        return replace(self, groups=(replace(self.group, window=window, window_layers=layers),))

    def without_window_part(self) -> KVGeometry:
        """The same layers, all in the head groups."""
        return replace(self, groups=(replace(self.group, window=None, window_layers=()),))

    @property
    def element_bytes(self) -> int:
        """Bytes of a stored element."""
        return 1 if self.kv_dtype == INT8 else DTYPE_BYTES[self.dtype]

    @property
    def group(self) -> PageGroup:
        """The page group."""
        return self.groups[0]

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """The model's layers in its order."""
        return self.group.layers

    def with_draft_layers(self, layers: tuple[LayerGeometry, ...], tail_elements: int = 0) -> KVGeometry:
        """These pages with the layers of a drafter as well, and the features that it goes on from."""
        return replace(self, groups=(replace(self.group, draft_layers=layers, tail_elements=tail_elements),))

    @property
    def draft(self) -> KVGeometry | None:
        """The draft layers as the layers of a model of their own; None if there are none."""
        if not self.group.draft_layers:
            return None
        return KVGeometry.of_layers(self.group.draft_layers, self.dtype, self.page_size)

    @property
    def draft_offset(self) -> int:
        """Elements of a page before its draft layers: head groups and latent layers."""
        num_elements = sum(layer.num_elements_per_token for layer in self.layers)
        return (num_elements - self.group.window_elements_per_token) * self.page_size

    @property
    def tail_offset(self) -> int:
        """Elements of a page before its tail."""
        return (self._first_scale_byte + self.group.scale_bytes) // self.element_bytes

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes of a token's values, without scales and what pages are padded with."""
        return self._num_leading_bytes_per_token + self.group.window_elements_per_token * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of `PAGE_ALIGNMENT`."""
        num_bytes = self.group.window_elements_per_token * self.page_size * self.element_bytes
        return self.window_start + ceil_div(num_bytes, PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    @property
    def window_start(self) -> int:
        """Bytes of a page before its window part; the whole page if it has none."""
        return ceil_div(self._num_used_bytes, PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    @property
    def num_leading_parts(self) -> int:
        """Parts of a page before its window part."""
        return len(self.part_ends) - bool(self.group.window_layers)

    @property
    def group_stride(self) -> int:
        """Elements of one head group, which is the distance of two."""
        return self.group.sharded_elements_per_token * self.page_size // self.group.head_groups

    @property
    def part_ends(self) -> tuple[int, ...]:
        """Ends of a page's parts in bytes: head groups, the replicated part and the window part if they are not empty.

        A part includes the padding behind it, so the parts cover the page.
        """
        group, group_bytes = self.group, self.group_stride * self.element_bytes
        ends = [group_bytes * number for number in range(1, group.head_groups + 1) if group_bytes]
        if not ends or self._num_used_bytes > ends[-1]:
            ends.append(self.window_start)
        leading = (*ends[:-1], self.window_start)
        return (*leading, self.page_bytes) if group.window_layers else leading

    def layer_offsets(self) -> list[tuple[int, int]]:
        """Element offsets of each layer's K and V in a page: in its first head group, or in the replicated part."""
        return list(self._layer_offsets())

    def scale_offsets(self) -> list[tuple[int, int]]:
        """Offsets of each layer's K and V scales in a page, in scales; empty without scales."""
        if self.kv_dtype is None:
            return []
        at, offsets = self._first_scale_byte // SCALE_BYTES, []
        for layer in self.layers:
            num_scales = layer.num_kv_heads * self.page_size
            offsets.append((at, at + num_scales))
            at += 2 * num_scales
        return offsets

    def num_pages(self, num_tokens: int) -> int:
        """Pages needed for `num_tokens` token slots."""
        return ceil_div(num_tokens, self.page_size)

    def parts(self) -> dict[str, str]:
        """Named parts of a fingerprint (`baton.domain.fingerprint`). They cover every field."""
        return {
            PAGE_FORMAT: str(self.version),
            "dtype": self.dtype if self.kv_dtype is None else f"{self.dtype} in pages of {self.kv_dtype}",
            "page_size": str(self.page_size),
            "page_group": self.group.describe(),
            "kv_head_groups": str(self.group.head_groups),
        }

    @property
    def _first_scale_byte(self) -> int:
        """Scales begin at a multiple of their size, behind all layers."""
        num_bytes = self._num_leading_bytes_per_token * self.page_size
        return ceil_div(num_bytes, SCALE_BYTES) * SCALE_BYTES if self.group.scale_bytes else num_bytes

    @property
    def _num_leading_bytes_per_token(self) -> int:
        """Bytes of a token's values before the window part."""
        group = self.group
        return (group.sharded_elements_per_token + group.replicated_elements_per_token) * self.element_bytes

    @property
    def _num_used_bytes(self) -> int:
        """Bytes before the window part, without padding."""
        group = self.group
        return self._first_scale_byte + group.scale_bytes + group.tail_elements * self.element_bytes

    def _layer_offsets(self) -> Iterator[tuple[int, int]]:
        at, latent_at = 0, self.group.sharded_elements_per_token * self.page_size
        window_at = self.window_start // self.element_bytes
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LatentGeometry):
                yield latent_at, latent_at
                latent_at += layer.num_elements_per_token * self.page_size
                continue
            if number in self.group.window_layers:
                yield window_at, window_at + layer.num_kv_heads * layer.k_head_dim * self.page_size
                window_at += layer.num_elements_per_token * self.page_size
                continue
            slots = layer.num_kv_heads // self.group.head_groups * self.page_size
            yield at, at + slots * layer.k_head_dim
            at += slots * (layer.k_head_dim + layer.v_head_dim)


def leading_parts_of(geometry: KVGeometry) -> int | None:
    """Parts of a page before its window part; None: it has no window part."""
    return geometry.num_leading_parts if geometry.group.window_layers else None


@dataclass(frozen=True, slots=True)
class PageWindow:
    """The widest window, in tokens, over pages of `page_size` slots. `num_parts`: of a page before its window part.

    In layers with a window a token at position q attends to keys at positions k with q - window < k <= q. Pages that
    end before that are read by layers without a window only, in this step and in all later ones.
    """

    num_tokens: int
    page_size: int
    num_parts: int

    @classmethod
    def of(cls, geometry: KVGeometry) -> PageWindow | None:
        """The window of pages with a window part; None for all others."""
        window = geometry.group.window
        return None if window is None else cls(window, geometry.page_size, geometry.num_leading_parts)

    def first_page(self, position: int) -> int:
        """Number of the first page whose window part the token at `position`, or a later one, may read."""
        return max(0, position - self.num_tokens + 1) // self.page_size

    def most_pages(self, num_tokens: int) -> int:
        """Most pages whose window parts a step with `num_tokens` adjacent tokens of a sequence reads or writes."""
        return ceil_div(self.num_tokens + num_tokens - 2, self.page_size) + 1

    def num_usable(
        self, pages: Sequence[PageId], is_windowless: Callable[[PageId], bool], next_position: int | None
    ) -> int:
        """Number of leading `pages` of a sequence that serve it as they are.

        `next_position`: of the first token that is computed over them; None: the one behind the last of these pages.
        """
        num_pages, at = len(pages), len(pages) - 1
        while at >= self.first_page(num_pages * self.page_size if next_position is None else next_position):
            if is_windowless(pages[at]):
                num_pages = at
            at -= 1
        return num_pages
