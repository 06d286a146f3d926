"""A simulated worker's page memory: an ordinary array."""

from __future__ import annotations

from baton.kv.memory import PageMemory


def two_parts(page_bytes: int) -> tuple[int, int]:
    """Ends of the parts of a page of two: every run has digests of several parts."""
    return page_bytes // 2, page_bytes


class SimMemory(PageMemory):
    """A pool's bytes without a mapping of their own."""

    def __init__(self, num_pages: int, page_bytes: int, part_ends: tuple[int, ...] = ()) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.part_ends = part_ends or (page_bytes,)
        self.buffer = memoryview(bytearray(num_pages * page_bytes))
        self.address = 0
