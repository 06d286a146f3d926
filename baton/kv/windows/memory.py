"""Bytes of pages whose window parts lie in slots of a second pool: the `PoolMemory` of a pool with window slots.

Pages are joined from both pools where they are read whole. A page without a slot reads as zeros in its window part, and
what is written there is dropped. `parts` copies nothing, and has an empty part instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.kv.memory import MemoryKind, PageMemory, page_parts
from baton.kv.pages import PagePool
from baton.kv.windows.slots import NO_SLOT, WindowSlots

_ABSENT = memoryview(b"")


class WindowedMemory:
    """Host memory of pages without their window parts, and of window parts.

    Another thread may read or write a page that keeps its slot meanwhile: one that is held, with its window part if
    that is meant.
    """

    kind = MemoryKind.DRAM
    device_id = 0

    def __init__(self, leading: PageMemory, windows: PageMemory) -> None:
        self.leading = leading
        self.windows = windows
        self.num_pages = leading.num_pages
        self.page_bytes = leading.page_bytes + windows.page_bytes
        self.part_ends = (*leading.part_ends, self.page_bytes)
        self.slot_of = array("i", [NO_SLOT]) * self.num_pages
        """Replaced by that of the pool: see `join`."""

    @classmethod
    def allocate(cls, num_pages: int, num_slots: int, part_ends: tuple[int, ...]) -> WindowedMemory:
        """Zeroed memory of `num_pages` pages that end at `part_ends[-2]`, and of `num_slots` last parts."""
        *leading_ends, edge, end = part_ends
        return cls(PageMemory(num_pages, edge, (*leading_ends, edge)), PageMemory(num_slots, end - edge))

    def join(self, pool: PagePool) -> WindowSlots:
        """Gives `pool`, none of whose pages is used yet, its window slots."""
        slots = pool.add_window_slots(self.windows.num_pages, len(self.part_ends))
        self.slot_of = slots.slot_of
        return slots

    @property
    def address(self) -> int:
        """Address of the pages without their window parts."""
        return self.leading.address

    @property
    def num_bytes(self) -> int:
        """Bytes of both pools."""
        return self.num_pages * self.leading.page_bytes + self.windows.num_pages * self.windows.page_bytes

    def read(self, pages: Sequence[int], num_bytes: int | None = None) -> list[memoryview]:
        """See `PoolMemory`: copies, unless no window part is meant."""
        if num_bytes is not None and num_bytes <= self.leading.page_bytes:
            return self.leading.read(pages, num_bytes)
        return [self._joined(page)[:num_bytes] for page in pages]

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        """See `PoolMemory`."""
        edge = self.leading.page_bytes
        for page, content in zip(pages, contents, strict=True):
            self.leading.page(page)[:] = content[:edge]
            if (slot := self.slot_of[page]) != NO_SLOT:
                self.windows.page(slot)[:] = content[edge:]

    def host_views(self, pages: Sequence[int], num_bytes: int) -> list[memoryview] | None:
        """See `PoolMemory`: None where window parts are meant."""
        return self.leading.host_views(pages, num_bytes) if num_bytes <= self.leading.page_bytes else None

    def parts(self, pages: Sequence[int]) -> list[list[memoryview]]:
        """See `PoolMemory`."""
        found = []
        for page in pages:
            slot = self.slot_of[page]
            window = _ABSENT if slot == NO_SLOT else self.windows.page(slot)
            found.append([*page_parts(self.leading.page(page), self.leading.part_ends), window])
        return found

    def _joined(self, page: int) -> memoryview:
        joined, edge = bytearray(self.page_bytes), self.leading.page_bytes
        joined[:edge] = self.leading.page(page)
        if (slot := self.slot_of[page]) != NO_SLOT:
            joined[edge:] = self.windows.page(slot)
        return memoryview(joined)
