"""Cost of kept digests in the engine thread, by page size, in CPU time.

    python -m bench.transfer.page_checks

*settle*: 1,000 new pages enter the prefix cache. *match*: as many cached pages are matched and checked. *slice*: one
slice of the scrubber; *share*: its part of a core over an idle pool of 512 MiB. *quarantine*: the whole pool is taken
out below one wrong page.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from baton.kv.keys import page_keys
from baton.kv.memory import PageMemory
from baton.kv.page_checks import PageChecks, Scrubber
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine
from baton.transfer.digest import PoolHasher

PAGE_BYTES = (16_384, 49_152, 524_288, 2_097_152)
POOL_BYTES = 512 * 1024 * 1024
PAGE_SIZE = 16
NUM_PAGES = 1000
NUM_ROUNDS = 9


class FilledPool:
    """A pool of `num_pages` pages and one prompt that fills it."""

    def __init__(self, memory: PageMemory) -> None:
        self.cache = PrefixCache(PagePool(memory.num_pages), PoolHasher(memory))
        self.checks = PageChecks(self.cache)
        self.quarantine = Quarantine(self.cache)
        self.tokens = [token % 50_000 for token in range(memory.num_pages * PAGE_SIZE)]
        self.table = PageTable(self.cache, PAGE_SIZE, "", Hold.LIVE)
        assert self.table.extend(len(self.tokens))
        self.settle_s = _cpu_s(partial(self.table.cache_full_pages, self.tokens, len(self.tokens)))
        self.table.release()

    def match_s(self) -> float:
        """Seconds of matching and checking the whole prompt, its page keys included."""
        seconds = _cpu_s(self._match)
        self.table.release()
        return seconds

    def _match(self) -> None:
        keys = page_keys(self.tokens, PAGE_SIZE, "")
        self.table.match_checked(keys, self.checks, self.quarantine, 0.0)

    def slices_s(self, page_bytes: int) -> tuple[float, float]:
        """Median seconds of a slice, and a round's share of a core."""
        scrubber, seconds, now = Scrubber(self.checks, page_bytes), [], 0.0
        while not scrubber.num_rounds:
            now = scrubber.next_slice_at(now) or now
            seconds.append(_cpu_s(partial(scrubber.run_slice, now, busy=False)))
        return statistics.median(seconds), sum(seconds) / now

    def quarantine_s(self) -> float:
        """Seconds of taking all pages out."""
        first = page_keys(self.tokens[:PAGE_SIZE], PAGE_SIZE, "")
        return _cpu_s(partial(self.quarantine.add_keys, first))


def main() -> None:
    """Prints the table."""
    print("| page | settle 1,000, ms | match 1,000, ms | slice, ms | share | quarantine, ms (pages) |")
    print("|---|---|---|---|---|---|")
    for page_bytes in PAGE_BYTES:
        small = PageMemory(NUM_PAGES, page_bytes, prefault=True)
        prompts = [FilledPool(small) for _ in range(NUM_ROUNDS)]
        settle_s = statistics.median(one.settle_s for one in prompts)
        match_s = statistics.median(one.match_s() for one in prompts)
        pool = FilledPool(PageMemory(POOL_BYTES // page_bytes, page_bytes, prefault=True))
        slice_s, share = pool.slices_s(page_bytes)
        last = f"{1e3 * pool.quarantine_s():.1f} ({pool.quarantine.num_pages:,})"
        costs = f"{1e3 * settle_s:.2f} | {1e3 * match_s:.2f} | {1e3 * slice_s:.2f} | {share:.4%} | {last}"
        print(f"| {page_bytes // 1024} KiB | {costs} |")


def _cpu_s(work: Callable[[], object]) -> float:
    started_at = time.thread_time()
    work()
    return time.thread_time() - started_at


if __name__ == "__main__":
    main()
