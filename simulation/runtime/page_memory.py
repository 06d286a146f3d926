"""A simulated worker's page memory: an ordinary array, and another one for window parts where a scenario has them."""

from __future__ import annotations

from baton.engine.fake_runner import SLOT_BYTES
from baton.kv.eviction import EvictionPolicy
from baton.kv.geometry import PageWindow
from baton.kv.memory import PageMemory
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.windows.memory import WindowedMemory
from baton.transfer.digest import PoolHasher


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


SimPages = SimMemory | WindowedMemory
WINDOW_TOKENS = 3
"""A row reads back the window parts of so many tokens, its own included."""


def sim_cache(
    num_pages: int, page_size: int, num_window_slots: int | None, eviction: EvictionPolicy, *, digests: bool
) -> tuple[PrefixCache, SimPages]:
    """A worker's empty cache and its pages. `num_window_slots` None: pages have no window parts."""
    page_bytes = page_size * SLOT_BYTES
    pool, memory = PagePool(num_pages), SimMemory(num_pages, page_bytes, two_parts(page_bytes))
    if num_window_slots is None:
        return PrefixCache(pool, PoolHasher(memory) if digests else None, eviction), memory
    windowed = WindowedMemory(memory, SimMemory(num_window_slots, page_bytes))
    windowed.join(pool)
    cache = PrefixCache(pool, PoolHasher(windowed) if digests else None, eviction)
    cache.window = PageWindow(WINDOW_TOKENS, page_size, len(memory.part_ends))
    return cache, windowed


def leading_parts(memory: SimPages) -> int | None:
    """As `baton.kv.geometry.leading_parts_of`."""
    return len(memory.leading.part_ends) if isinstance(memory, WindowedMemory) else None
