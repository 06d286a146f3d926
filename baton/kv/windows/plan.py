"""Sizes of a pool: how many pages, and how many slots for their window parts. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.kv.geometry import KVGeometry, PageWindow

AUTO_WINDOWS = 2
"""`auto_share` expects sequences of so many windows."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`num_pages` pages. `num_slots`: for their window parts; None: these are in the pages, or there are none.

    `least_slots`: what one sequence needs.
    """

    num_pages: int
    num_slots: int | None = None
    least_slots: int = 0

    def num_bytes(self, geometry: KVGeometry) -> int:
        """Bytes of the pool."""
        if self.num_slots is None:
            return self.num_pages * geometry.page_bytes
        return self.num_pages * geometry.window_start + self.num_slots * (geometry.page_bytes - geometry.window_start)

    def num_whole_pages(self, geometry: KVGeometry) -> int:
        """Pages with all their parts that take the bytes of the pool."""
        return self.num_bytes(geometry) // geometry.page_bytes


def auto_share(window: PageWindow, max_model_len: int, num_windows: int = AUTO_WINDOWS) -> float:
    """Slots a page: as many as sequences of `num_windows` windows need, or of the whole context if that is less."""
    num_tokens = min(num_windows * window.num_tokens, max_model_len)
    return min(1.0, window.most_pages(2) * window.page_size / num_tokens)


def plan_pool(
    geometry: KVGeometry, share: float, least_slots: int, *, num_bytes: int = 0, num_pages: int | None = None
) -> PoolPlan:
    """A pool of `num_pages` pages, or of `num_bytes`, with `share` slots a page and at least `least_slots`.

    Without window slots if the model has no window part, or if each page would have one. At least one page.
    """
    window_bytes = geometry.page_bytes - geometry.window_start
    whole = PoolPlan(num_pages or max(1, num_bytes // geometry.page_bytes))
    if not window_bytes:
        return whole
    if num_pages is None:
        num_slots = max(least_slots, int(share * num_bytes / (geometry.window_start + share * window_bytes)))
        num_pages = (num_bytes - num_slots * window_bytes) // geometry.window_start
    else:
        num_slots = max(least_slots, math.ceil(share * num_pages))
    return whole if num_slots >= num_pages else PoolPlan(num_pages, num_slots, least_slots)
