"""The page pool as tensors: writes new tokens, gathers a request's pages, copies pages to the host and back.

Owns views, not pages: `baton.kv` decides which page holds what. Called by the attention hook and the runner. Inside a
head group of a page (`baton.kv.geometry`) the layers follow one another. A layer's K is [heads of the group, page_size,
head_dim] (HND), followed by its V. A page is contiguous, so one descriptor moves it. The slots of a head are adjacent,
as CPU caches and flashinfer need them. A latent layer has one KV head whose V is the first part of its K. Pages of int8
have scales (`page_scales`): tokens are rounded when they are written, and gathered as numbers of the model's dtype.

Where window parts are kept apart (`baton.kv.windows`), layers with a window lie in slots of a second pool. Their views
and selections count slots (`baton.model.attention.window_slots`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import Broken
from baton.kv.geometry import CacheLayer, KVGeometry, LatentGeometry, PageWindow
from baton.kv.memory import PageMemory
from baton.kv.windows.memory import WindowedMemory
from baton.kv.windows.slots import NO_SLOT
from baton.model.page_scales import PageScales


@dataclass(frozen=True, slots=True)
class _WindowPool:
    """Window parts in a pool of their own: [num_slots, elements], and the slot of each page in `memory`."""

    pool: torch.Tensor
    memory: WindowedMemory
    window: PageWindow


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
        apart: _WindowPool | None = None,
    ) -> None:
        self._apart = apart
        self.geometry = geometry
        self.dtype = _dtype(geometry.dtype)
        self.scales = None if geometry.kv_dtype is None else PageScales(geometry, pool)
        self.num_pages = pool.shape[0] - has_scratch
        self.scratch_page = self.num_pages if has_scratch else None
        self._pool = pool
        self._host = None if host is None else _as_pages(host, geometry)
        layers = geometry.layers
        starts = [-first_element] * len(layers)
        pools = [pool] * len(layers)
        if apart is not None:
            for number in geometry.group.window_layers:
                starts[number], pools[number] = geometry.window_start // geometry.element_bytes, apart.pool
        pairs = zip(geometry.layer_offsets(), starts, strict=True)
        offsets = [(keys - start, values - start) for (keys, values), start in pairs]
        sides = list(zip(pools, layers, offsets, strict=True))
        self._keys = [_key_side(each, geometry, layer, at) for each, layer, at in sides]
        self._values = [_value_side(each, geometry, layer, at) for each, layer, at in sides]
        self._is_latent = [isinstance(layer, LatentGeometry) for layer in layers]
        # The pool as rows of `unit` elements. A page, and a head's slots in it, are a whole number of adjacent rows,
        # so gathering is one `index_select`, five times as fast as advanced indexing on the views.
        strides = {stride for layer in layers for stride in layer.slot_strides}
        sizes = {each.shape[1] for each in pools}
        self._unit = math.gcd(*sizes, *(geometry.page_size * stride for stride in strides), first_element)
        self._rows = [each.view(-1, self._unit) for each in pools]
        self._key_rows, self._value_rows = ([offset[i] // self._unit for offset in offsets] for i in (0, 1))

    @classmethod
    def on_memory(
        cls, geometry: KVGeometry, memory: PageMemory | WindowedMemory, host: PageMemory | None = None
    ) -> PageStorage:
        """Wraps host memory that a transfer may read and write concurrently."""
        if isinstance(memory, PageMemory):
            return cls(geometry, _as_pages(memory, geometry), host)
        if memory.part_ends != geometry.part_ends or (window := PageWindow.of(geometry)) is None:
            raise ValueError("this memory has window parts of another geometry")
        leading, windows = (_as_tensor(each, geometry) for each in (memory.leading, memory.windows))
        return cls(geometry, leading, host, apart=_WindowPool(windows, memory, window))

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
    def has_window_slots(self) -> bool:
        """True if window parts are kept apart."""
        return self._apart is not None

    def is_apart(self, layer: int) -> bool:
        """True if the layer lies in slots of window parts, not in the pages."""
        return self._apart is not None and layer in self.geometry.group.window_layers

    def reached_slots(self, pages: Sequence[int], start: int, end: int) -> tuple[int, list[int]]:
        """Slots of the window parts that tokens at [start, end) of a table read and write, and the first's page number.

        Raises `Broken` if one of them is not there.
        """
        assert self._apart is not None, "window parts are in their pages"
        window, slot_of = self._apart.window, self._apart.memory.slot_of
        first = window.first_page(start)
        slots = [slot_of[page] for page in pages[first : ceil_div(end, window.page_size)]]
        if NO_SLOT in slots:
            page = pages[first + slots.index(NO_SLOT)]
            raise Broken(f"page {page} is read at position {start} without its window part")
        return first, slots

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
        """Copies slots of all layers to others, pairwise and all at once: (pages, slots) [moves] each.

        Not where window parts are apart: layers with a window have no trees, which need this.
        """
        if self._apart is not None:
            raise ValueError("slots of a window are not moved")
        views = [view.permute(0, 3, 1, 2, 4) for side in (self._keys, self._values) for view in side]
        if self.scales is not None:
            views += [view.transpose(1, 2) for side in (self.scales.keys, self.scales.values) for view in side]
        for by_slot in views:
            by_slot[targets] = by_slot[sources]

    def clear(self, pages: torch.Tensor) -> None:
        """Zeros whole pages, without window parts that are apart.

        A page that is not filled at once must not keep its last owner's values. A NaN would survive masking, since 0 x
        NaN is NaN, and the digest would depend on them.
        """
        self._pool.index_fill_(0, pages, 0)

    def clear_windows(self, slots: torch.Tensor) -> None:
        """Zeros window parts that are apart."""
        assert self._apart is not None, "window parts are in their pages"
        self._apart.pool.index_fill_(0, slots, 0)

    def select(self, pages: torch.Tensor, *, is_apart: bool = False) -> PageSelection:
        """Selects page tables [rows, pages a row], to be gathered layer by layer.

        `is_apart`: for layers that are, `pages` are slots.
        """
        return PageSelection(self, pages, is_apart)

    def gather_keys(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Gathers rows of a `PageSelection` of one layer's K: [*, unit]."""
        return self._rows[layer].index_select(0, rows + self._key_rows[layer])

    def gather_values(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Gathers rows of a `PageSelection` of one layer's V: [*, unit]."""
        return self._rows[layer].index_select(0, rows + self._value_rows[layer])

    def row_index(
        self, pages: torch.Tensor, num_kv_heads: int, head_dim: int, *, is_apart: bool = False
    ) -> torch.Tensor:
        """Flat row numbers before a layer's offset, ordered [rows, heads, pages a row, units of a head]."""
        num_units = self.geometry.page_size * head_dim // self._unit
        num_groups = min(self.geometry.group.head_groups, num_kv_heads)
        pool = self._apart.pool if is_apart and self._apart is not None else self._pool
        num_rows_a_page = pool.shape[1] // self._unit
        groups = torch.arange(num_groups, device=pages.device)[:, None] * (self.geometry.group_stride // self._unit)
        units = torch.arange(num_kv_heads // num_groups * num_units, device=pages.device)
        in_page = (groups + units).view(1, num_kv_heads, 1, num_units)
        return (pages[:, None, :, None] * num_rows_a_page + in_page).flatten()

    def copy_to_host(self, pages: Sequence[int], slots: Sequence[int], window_slots: Sequence[int] = ()) -> None:
        """Copies pages to host slots, pairwise. Raises `ValueError` without swap space.

        `window_slots`: of the window parts that are apart, or `NO_SLOT`; where they lie then does not matter any more.
        """
        host, size = self._swap_space(), self._pool.shape[1]
        host[list(slots), :size] = self._pool[list(pages)].cpu()
        if self._apart is not None:
            ours, theirs = _present(window_slots, slots)
            host[theirs, size:] = self._apart.pool[ours]

    def copy_from_host(self, slots: Sequence[int], pages: Sequence[int], window_slots: Sequence[int] = ()) -> None:
        """Copies host slots back into pages, pairwise, and their window parts into `window_slots`.

        Raises `ValueError` without swap space.
        """
        host, size = self._swap_space(), self._pool.shape[1]
        self._pool[list(pages)] = host[list(slots), :size].to(self.device)
        if self._apart is not None:
            ours, theirs = _present(window_slots, slots)
            self._apart.pool[ours] = host[theirs, size:]

    def _swap_space(self) -> torch.Tensor:
        if self._host is None:
            raise ValueError("this storage has no swap space to copy pages to")
        return self._host


class PageSelection:
    """Pages of some rows, gathered once a layer. Layers of one shape share the row numbers.

    `is_apart`: only of layers that are; `pages` are slots.
    """

    def __init__(self, storage: PageStorage, pages: torch.Tensor, is_apart: bool = False) -> None:
        self._is_apart = is_apart
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
            known = self._storage.row_index(self._pages, num_kv_heads, head_dim, is_apart=self._is_apart)
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
    return _as_tensor(memory, geometry)


def _as_tensor(memory: PageMemory, geometry: KVGeometry) -> torch.Tensor:
    return torch.frombuffer(memory.buffer, dtype=_dtype(geometry.kv_dtype or geometry.dtype)).view(memory.num_pages, -1)


def _present(window_slots: Sequence[int], slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those of `window_slots` that are there, and the host slots that go with them."""
    there = [(ours, theirs) for ours, theirs in zip(window_slots, slots, strict=True) if ours != NO_SLOT]
    return [ours for ours, _ in there], [theirs for _, theirs in there]


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
