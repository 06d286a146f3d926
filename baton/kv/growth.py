"""Growth reserves: pages that running rows are expected to take, kept free when a new row asks for room. Pure.

A row takes a page at every page edge until it ends, and when it ends is not known before. Without a reserve new rows
are admitted as long as their prompts fit, and rows are preempted later. The modes differ in how much they keep free:
see `GrowthPolicy`. A reserve only delays admission: it never changes or shortens an output.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

NUM_LENGTHS = 256
"""Ended outputs whose lengths are remembered."""
MIN_LENGTHS = 16
"""Ended outputs before the lengths are used."""
FIRST_SHARE = 0.7
"""Share of the longest output that is expected before any was seen; SGLang's initial `new_token_ratio`."""
MIN_RATIO = 0.14 * FIRST_SHARE
NUM_DECAY_STEPS = 600
EXTRA_TOKENS = 20
"""Tokens a row that the ratio adds after a preemption: the next steps must not preempt again."""


class GrowthPolicy(StrEnum):
    """Pages kept free for rows to grow.

    NONE: none. RATIO: a share of each row's longest rest, which falls with every step and rises with a preemption
    (SGLang's adaptive `new_token_ratio`). PEAK: the peak of future use under the output lengths learned here (the
    Past-Future scheduler of LightLLM, arXiv 2507.10150). FULL: the longest rest of every row.
    """

    NONE = "none"
    RATIO = "ratio"
    PEAK = "peak"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class RowGrowth:
    """One row, or one reservation for a row, as the reserve sees it.

    `num_tokens`: slots in use now. `max_rest`: most output tokens still to come. `num_pages`: pages it holds or has
    reserved; `num_own_pages` of them become available when it ends, the others are shared.
    """

    num_tokens: int
    num_output_tokens: int
    max_rest: int
    num_pages: int
    num_own_pages: int


class GrowthReserve:
    """Decides whether rows can grow within a pool. Learns from the rows that end and are preempted."""

    def __init__(self, mode: GrowthPolicy, page_size: int, clip_tokens: int) -> None:
        """`clip_tokens`: longest rest of a row that any mode reserves for."""
        self.mode = mode
        self._page_size = page_size
        self._clip_tokens = clip_tokens
        self._lengths: deque[int] = deque(maxlen=NUM_LENGTHS)
        self._ratio = FIRST_SHARE

    @property
    def ratio(self) -> float:
        """Share of each row's longest rest that RATIO keeps free now."""
        return self._ratio

    def on_step(self) -> None:
        """Lowers the ratio by one step."""
        self._ratio = max(MIN_RATIO, self._ratio - (FIRST_SHARE - MIN_RATIO) / NUM_DECAY_STEPS)

    def on_preempted(self, rows: Sequence[RowGrowth]) -> None:
        """Raises the ratio to what `rows`, those that go on running, have used of their outputs, and a few tokens."""
        num_used = sum(row.num_output_tokens + EXTRA_TOKENS for row in rows)
        num_most = sum(row.num_output_tokens + self._most(row) for row in rows)
        self._ratio = max(self._ratio, min(1.0, num_used / (num_most + 1)))

    def on_ended(self, num_output_tokens: int) -> None:
        """Remembers the length of an output."""
        self._lengths.append(num_output_tokens)

    def fits(self, rows: Sequence[RowGrowth], num_available: int) -> bool:
        """True if `rows`, all of them and the new one, can grow within `num_available` pages beyond their own.

        A row alone always fits: it may run, and is checked against the pool when it is claimed."""
        if len(rows) <= 1:
            return True
        match self.mode:
            case GrowthPolicy.NONE:
                return True
            case GrowthPolicy.RATIO:
                return sum(self._pages(row, self._ratio * self._most(row)) for row in rows) <= num_available
            case GrowthPolicy.FULL:
                return sum(self._pages(row, self._most(row)) for row in rows) <= num_available
            case GrowthPolicy.PEAK:
                return self.peak_pages(rows) <= num_available

    def peak_pages(self, rows: Sequence[RowGrowth]) -> float:
        """Most pages beyond the present ones that `rows` need at once, if each ends after its expected rest.

        Use is highest just before some row ends: those that end later have grown until then, those that ended before
        have returned their own pages. Each row counts half a page more, for its last page.
        """
        rests = sorted(((self.expected_rest(row), row) for row in rows), key=lambda pair: -pair[0])
        num_returned = sum(row.num_own_pages for row in rows)
        peak, num_tokens, num_pages = 0.0, 0, 0
        for num_alive, (rest, row) in enumerate(rests, 1):
            num_tokens += row.num_tokens
            num_pages += row.num_pages
            num_returned -= row.num_own_pages
            growth = (num_tokens + num_alive * rest) / self._page_size + num_alive / 2 - num_pages
            peak = max(peak, growth - num_returned)
        return peak

    def expected_rest(self, row: RowGrowth) -> float:
        """Expected further tokens of a row: the median of the learned lengths beyond its own, less its own.

        A row longer than all learned outputs is expected to double. Before enough rows ended, a share of `max_rest`.
        """
        most = self._most(row)
        if len(self._lengths) < MIN_LENGTHS:
            return FIRST_SHARE * most
        longer = [length for length in self._lengths if length > row.num_output_tokens]
        rest = statistics.median(longer) - row.num_output_tokens if longer else row.num_output_tokens
        return min(most, rest)

    def _most(self, row: RowGrowth) -> int:
        return min(row.max_rest, self._clip_tokens)

    def _pages(self, row: RowGrowth, rest: float) -> float:
        return max(0.0, math.ceil((row.num_tokens + rest) / self._page_size) - row.num_pages)
