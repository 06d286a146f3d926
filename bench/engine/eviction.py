"""Cached prompt tokens of a request trace, by eviction policy and pool size.

    python -m bench.engine.eviction conversation_trace.jsonl --pools 1000 4000 16000

Replays the prompts of a Mooncake trace in order of arrival through the product's prefix cache and page tables. A page
is one block of the trace (512 tokens); a prompt holds its pages until the next one comes. The last column is the share
with a pool in which every block has room.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from baton.kv.eviction import EvictionPolicy
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.cli.bench.workload.traces import read_mooncake

POOLS = (1_000, 4_000, 16_000)


def cached_share(prompts: Sequence[Sequence[int]], num_pages: int, policy: EvictionPolicy) -> float:
    """Share of all blocks that were cached when their prompt came. Prompts that exceed the pool count as not cached."""
    cache = PrefixCache(PagePool(num_pages), policy=policy)
    num_cached = num_blocks = 0
    for blocks in prompts:
        table = PageTable(cache, 1, "", Hold.LIVE)
        num_matched = table.match_tokens(blocks)
        num_blocks += len(blocks)
        if table.extend(len(blocks)):
            num_cached += num_matched
            table.cache_full_pages(blocks, len(blocks))
        table.release()
    return num_cached / num_blocks


def table(prompts: Sequence[Sequence[int]], pools: Sequence[int]) -> list[str]:
    """The shares as lines of a Markdown table."""
    num_blocks = len({block for blocks in prompts for block in blocks})
    lines = [
        f"| policy | {' | '.join(f'{pool:,} pages' for pool in pools)} | all {num_blocks:,} |",
        "|---|" + "---|" * (len(pools) + 1),
    ]
    for policy in EvictionPolicy:
        shares = [cached_share(prompts, pool, policy) for pool in (*pools, num_blocks)]
        lines.append(f"| {policy.value} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    return lines


def main() -> None:
    """Prints the table of one trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pools", type=int, nargs="+", default=POOLS)
    options = parser.parse_args()
    print("\n".join(table([row.block_ids for row in read_mooncake(options.trace)], options.pools)))


if __name__ == "__main__":
    main()
