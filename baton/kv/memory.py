"""The bytes of a page pool in host memory: mapped once, huge-page backed, never unmapped while the process lives.

NIXL peers hold this address; memory that came and went would be a segmentation fault in somebody else's read
(NIXL's source and our measurements agree), so there is no `close`.
"""

from __future__ import annotations

import ctypes
import mmap

HUGE_PAGE_BYTES = 2 * 1024 * 1024


class PageMemory:
    """`num_pages` x `page_bytes` of zeroed memory, page `i` at `address + i * page_bytes`.

    `prefault`: take the memory from the kernel now; a first touch in the middle of a transfer costs most of its speed.
    """

    def __init__(self, num_pages: int, page_bytes: int, *, prefault: bool = False) -> None:
        if num_pages < 1 or page_bytes < 1:
            raise ValueError(f"a pool needs pages of bytes, not {num_pages} x {page_bytes}")
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        num_bytes = -(-num_pages * page_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if prefault:
            self._prefault(num_bytes)
        self.buffer = memoryview(self._map)[: num_pages * page_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _prefault(self, num_bytes: int) -> None:
        for at in range(0, num_bytes, mmap.PAGESIZE):
            self._map[at] = 0

    def page(self, page_id: int) -> memoryview:
        """The bytes of one page, writable. Raises `IndexError` outside the pool."""
        if not 0 <= page_id < self.num_pages:
            raise IndexError(f"page {page_id} is outside a pool of {self.num_pages}")
        start = page_id * self.page_bytes
        return self.buffer[start : start + self.page_bytes]
