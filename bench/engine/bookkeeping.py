"""Cost of page bookkeeping in the engine thread, by context and pool size; both must stay flat.

    python -m bench.engine.bookkeeping

*edge*: enters one finished page of a row into the prefix cache, for rows of several lengths. *slice*: runs one slice of
the idle integrity check, for pools of several sizes, and the whole check, which tests and the simulation use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from baton.kv.integrity_check import IntegrityCheck
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.settings.groups import DEFAULT_IDLE_CHECK_PAGES

PAGE_SIZE = 16
CONTEXTS = (2_048, 16_384, 131_072)
POOLS = (8_192, 87_000, 500_000)
NUM_EDGES = 64
NUM_SLICES = 32


def page_edge_s(num_tokens: int) -> float:
    """Median seconds of a page edge at the end of a row of `num_tokens` tokens."""
    cache = PrefixCache(PagePool(num_tokens // PAGE_SIZE + NUM_EDGES))
    tokens = [token % 50_000 for token in range(num_tokens + NUM_EDGES * PAGE_SIZE)]
    table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE)
    assert table.extend(len(tokens))
    table.cache_full_pages(tokens, num_tokens)
    ends = range(num_tokens + PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)
    return statistics.median(_seconds(partial(table.cache_full_pages, tokens, end)) for end in ends)


def idle_check_s(num_pages: int, max_slice_pages: int | None) -> float:
    """Median seconds of one slice of the idle check over a full prefix cache of `num_pages` pages."""
    cache = PrefixCache(PagePool(num_pages))
    tokens = [token % 50_000 for token in range(num_pages * PAGE_SIZE)]
    table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE)
    assert table.extend(len(tokens))
    table.cache_full_pages(tokens, len(tokens))
    table.release()
    check = IntegrityCheck(cache, max_slice_pages)
    return statistics.median(_seconds(check.run_slice) for _ in range(NUM_SLICES if max_slice_pages else 1))


def main() -> None:
    """Prints both tables."""
    print("| context, tokens | page edge, us |\n|---|---|")
    for num_tokens in CONTEXTS:
        print(f"| {num_tokens:,} | {1e6 * page_edge_s(num_tokens):.1f} |")
    print("\n| pool, pages | idle slice, ms | whole check, ms |\n|---|---|---|")
    for num_pages in POOLS:
        slice_s, whole_s = idle_check_s(num_pages, DEFAULT_IDLE_CHECK_PAGES), idle_check_s(num_pages, None)
        print(f"| {num_pages:,} | {1e3 * slice_s:.2f} | {1e3 * whole_s:.0f} |")


def _seconds(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


if __name__ == "__main__":
    main()
