"""The page pool as tensors: writes new tokens, gathers a request's pages, copies pages to the host and back.

Owns views, not pages: `baton.kv` decides which page holds what. Called by the attention hook and the runner. Inside a
head group of a page (`baton.kv.geometry`) the layers follow one another. A layer's K is [heads of the group, page_size,
head_dim] (HND), followed by its V. A page is contiguous, so one descriptor moves it. The slots of a head are adjacent,
as CPU caches and flashinfer need them. A latent layer has one KV head whose V is the first part of its K. Pages of int8
have scales (`page_scales`): tokens are rounded when they are written, and gathered as numbers of the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from baton.kv.geometry import CacheLayer, KVGeometry, LatentGeometry
from baton.kv.memory import PageMemory
from baton.model.page_scales import PageScales


class PageStorage:
    """Views of `pool` [num_pages, elements of a page], contiguous. `host`: the swap space for pages of preempted rows.

    `first_element`: of every page, where the layers of `geometry` begin. With a scratch page the pool has one page more
    at its end. It belongs to no request: rows that pad a batch to a fixed size write there.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        pool: torch.Tensor,
        host: PageMemory | None = None,
        *,
        has_scratch: bool = False,
        first_element: int = 0,
    ) -> None:
        self.geometry = geometry
        self.dtype = _dtype(geometry.dtype)
        self.scales = None if geometry.kv_dtype is None else PageScales(geometry, pool)
        self.num_pages = pool.shape[0] - has_scratch
        self.scratch_page = self.num_pages if has_scratch else None
        self._pool = pool
        self._host = None if host is None else _as_pages(host, geometry)
        layers = geometry.layers
        offsets = [(keys + first_element, values + first_element) for keys, values in geometry.layer_offsets()]
        self._keys = [_key_side(pool, geometry, *at) for at in zip(layers, offsets, strict=True)]
        self._values = [_value_side(pool, geometry, *at) for at in zip(layers, offsets, strict=True)]
        self._is_latent = [isinstance(layer, LatentGeometry) for layer in layers]
        # The pool as rows of `unit` elements. A page, and a head's slots in it, are a whole number of adjacent rows,
        # so gathering is one `index_select`, five times as fast as advanced indexing on the views.
        strides = {stride for layer in layers for stride in layer.slot_strides}
        self._unit = math.gcd(pool.shape[1], *(geometry.page_size * stride for stride in strides), first_element)
        self._rows = pool.view(-1, self._unit)
        self._key_rows, self._value_rows = ([offset[i] // self._unit for offset in offsets] for i in (0, 1))

    @classmethod
    def on_memory(cls, geometry: KVGeometry, memory: PageMemory, host: PageMemory | None = None) -> PageStorage:
        """Wraps host memory that a transfer may read and write concurrently."""
        return cls(geometry, _as_pages(memory, geometry), host)

    @classmethod
    def allocate(
        cls,
        geometry: KVGeometry,
        num_pages: int,
        device: str = "cpu",
        host: PageMemory | None = None,
        *,
        has_scratch: bool = False,
    ) -> PageStorage:
        """Allocates a zeroed pool on `device`: for GPUs, and for checks."""
        shape = num_pages + has_scratch, geometry.page_bytes // geometry.element_bytes
        pool = torch.zeros(shape, dtype=_dtype(geometry.kv_dtype or geometry.dtype), device=device)
        return cls(geometry, pool, host, has_scratch=has_scratch)

    def draft_view(self) -> PageStorage:
        """The same pages with their draft layers as the layers. Raises `ValueError` if they have none."""
        draft, first = self.geometry.draft, self.geometry.draft_offset
        if draft is None:
            raise ValueError("these pages have no draft layers")
        return PageStorage(draft, self._pool, has_scratch=self.scratch_page is not None, first_element=first)

    @property
    def tails(self) -> torch.Tensor:
        """The tails of all pages, [pages, tail_elements], strided. Raises `ValueError` if pages have none."""
        first, size = self.geometry.tail_offset, self.geometry.group.tail_elements
        if not size:
            raise ValueError("these pages have no tail")
        return self._pool[:, first : first + size]

    @property
    def address(self) -> int:
        """Address of page 0 in host or device memory."""
        return self._pool.data_ptr()

    @property
    def device(self) -> torch.device:
        return self._pool.device

    def page_bytes(self) -> torch.Tensor:
        """The pool without its scratch page as uint8 [num_pages, bytes of a page], on its device."""
        return self._pool[: self.num_pages].view(torch.uint8)

    def synchronize(self) -> None:
        """Waits until the device has done this thread's work; returns at once for host memory."""
        if self._pool.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def keys(self, layer: int) -> torch.Tensor:
        """One layer's K over the whole pool: [pages, head groups, heads of a group, page_size, k_head_dim], strided.

        As stored: int8 without its scales, if pages are of int8.
        `flatten(1, 2)` makes it [pages, num_kv_heads, page_size, k_head_dim]: a view for one head group and for as
        many as heads, otherwise a copy.
        """
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """One layer's V over the whole pool, like `keys`."""
        return self._values[layer]

    def write(
        self, layer: int, pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes new tokens. `pages` and `slots` are [tokens]; `keys` and `values` [tokens, num_kv_heads, dim].

        The values of a latent layer are part of its keys, and are not written.
        """
        if self.scales is not None:
            keys = self.scales.write(self.scales.keys[layer], pages, slots, keys)
            values = self.scales.write(self.scales.values[layer], pages, slots, values)
        sides = [(self._keys[layer], keys), (self._values[layer], values)]
        for view, tokens in sides[:1] if self._is_latent[layer] else sides:
            by_slot = view.permute(0, 3, 1, 2, 4)
            by_slot[pages, slots] = tokens.unflatten(-2, by_slot.shape[2:4])

    def move_slots(
        self, sources: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Copies slots of all layers to others, pairwise and all at once: (pages, slots) [moves] each."""
        views = [view.permute(0, 3, 1, 2, 4) for side in (self._keys, self._values) for view in side]
        if self.scales is not None:
            views += [view.transpose(1, 2) for side in (self.scales.keys, self.scales.values) for view in side]
        for by_slot in views:
            by_slot[targets] = by_slot[sources]

    def clear(self, pages: torch.Tensor) -> None:
        """Zeros whole pages.

        A page that is not filled at once must not keep its last owner's values. A NaN would survive masking, since 0 x
        NaN is NaN, and the digest would depend on them.
        """
        self._pool.index_fill_(0, pages, 0)

    def select(self, pages: torch.Tensor) -> PageSelection:
        """Selects page tables [rows, pages a row], to be gathered layer by layer."""
        return PageSelection(self, pages)

    def gather_keys(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Gathers rows of a `PageSelection` of one layer's K: [*, unit]."""
        return self._rows.index_select(0, rows + self._key_rows[layer])

    def gather_values(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Gathers rows of a `PageSelection` of one layer's V: [*, unit]."""
        return self._rows.index_select(0, rows + self._value_rows[layer])

    def row_index(self, pages: torch.Tensor, num_kv_heads: int, head_dim: int) -> torch.Tensor:
        """Flat row numbers before a layer's offset, ordered [rows, heads, pages a row, units of a head]."""
        num_units = self.geometry.page_size * head_dim // self._unit
        num_groups = min(self.geometry.group.head_groups, num_kv_heads)
        num_rows_a_page = self._pool.shape[1] // self._unit
        groups = torch.arange(num_groups, device=pages.device)[:, None] * (self.geometry.group_stride // self._unit)
        units = torch.arange(num_kv_heads // num_groups * num_units, device=pages.device)
        in_page = (groups + units).view(1, num_kv_heads, 1, num_units)
        return (pages[:, None, :, None] * num_rows_a_page + in_page).flatten()

    def copy_to_host(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages to host slots, pairwise. Raises `ValueError` without swap space."""
        self._swap_space()[list(slots)] = self._pool[list(pages)].cpu()

    def copy_from_host(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies host slots back into pages, pairwise. Raises `ValueError` without swap space."""
        self._pool[list(pages)] = self._swap_space()[list(slots)].to(self.device)

    def _swap_space(self) -> torch.Tensor:
        if self._host is None:
            raise ValueError("this storage has no swap space to copy pages to")
        return self._host


class PageSelection:
    """Pages of some rows, gathered once a layer. Layers of one shape share the row numbers."""

    def __init__(self, storage: PageStorage, pages: torch.Tensor) -> None:
        self._storage = storage
        self._pages = pages
        self._index: dict[tuple[int, int], torch.Tensor] = {}

    def keys(self, layer: int) -> torch.Tensor:
        """[rows, num_kv_heads, token slots, k_head_dim] of the model's dtype, a copy."""
        shape, scales = self._storage.geometry.layers[layer], self._storage.scales
        rows = self._rows(shape.num_kv_heads, shape.k_head_dim)
        keys = self._shaped(self._storage.gather_keys(layer, rows), shape.num_kv_heads, shape.k_head_dim)
        return keys if scales is None else scales.restore(scales.keys[layer], self._pages, keys, self._storage.dtype)

    def keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sides of a layer; a latent layer is gathered once."""
        keys, shape = self.keys(layer), self._storage.geometry.layers[layer]
        if isinstance(shape, LatentGeometry):
            return keys, keys[..., : shape.rank]
        return keys, self.values(layer)

    def values(self, layer: int) -> torch.Tensor:
        """[rows, num_kv_heads, token slots, v_head_dim] of the model's dtype, a copy."""
        shape, scales = self._storage.geometry.layers[layer], self._storage.scales
        if isinstance(shape, LatentGeometry):
            return self.keys(layer)[..., : shape.rank]
        rows = self._rows(shape.num_kv_heads, shape.v_head_dim)
        values = self._shaped(self._storage.gather_values(layer, rows), shape.num_kv_heads, shape.v_head_dim)
        if scales is None:
            return values
        return scales.restore(scales.values[layer], self._pages, values, self._storage.dtype)

    def _rows(self, num_kv_heads: int, head_dim: int) -> torch.Tensor:
        known = self._index.get((num_kv_heads, head_dim))
        if known is None:
            known = self._storage.row_index(self._pages, num_kv_heads, head_dim)
            self._index[num_kv_heads, head_dim] = known
        return known

    def _shaped(self, rows: torch.Tensor, num_kv_heads: int, head_dim: int) -> torch.Tensor:
        return rows.view(self._pages.shape[0], num_kv_heads, -1, head_dim)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _as_pages(memory: PageMemory, geometry: KVGeometry) -> torch.Tensor:
    """The memory as [num_pages, elements of a page]. Raises `ValueError` if its page size differs."""
    if memory.page_bytes != geometry.page_bytes:
        raise ValueError(f"memory has pages of {memory.page_bytes} bytes, the geometry of {geometry.page_bytes}")
    return torch.frombuffer(memory.buffer, dtype=_dtype(geometry.kv_dtype or geometry.dtype)).view(memory.num_pages, -1)


Side = tuple[int, int, int, int]
"""One side of a layer: its heads, its offset in a page, the elements of a slot, and the distance of two slots."""


def _key_side(pool: torch.Tensor, geometry: KVGeometry, layer: CacheLayer, offsets: tuple[int, int]) -> torch.Tensor:
    return _grouped(pool, geometry, (layer.num_kv_heads, offsets[0], layer.k_head_dim, layer.slot_strides[0]))


def _value_side(pool: torch.Tensor, geometry: KVGeometry, layer: CacheLayer, offsets: tuple[int, int]) -> torch.Tensor:
    return _grouped(pool, geometry, (layer.num_kv_heads, offsets[1], layer.v_head_dim, layer.slot_strides[1]))


def _grouped(pool: torch.Tensor, geometry: KVGeometry, side: Side) -> torch.Tensor:
    """A view of one side: [pages, head groups, heads of a group, slots, dim]. One head lies in one group."""
    num_kv_heads, offset, head_dim, slot_stride = side
    num_groups = min(geometry.group.head_groups, num_kv_heads)
    shape = (pool.shape[0], num_groups, num_kv_heads // num_groups, geometry.page_size, head_dim)
    strides = (pool.stride(0), geometry.group_stride, geometry.page_size * slot_stride, slot_stride, 1)
    return pool.as_strided(shape, strides, pool.storage_offset() + offset)
