"""A simulated worker's page memory: an ordinary array."""

from __future__ import annotations

from baton.kv.memory import PageMemory


class SimMemory(PageMemory):
    """A pool's bytes without a mapping of their own."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.buffer = memoryview(bytearray(num_pages * page_bytes))
        self.address = 0
