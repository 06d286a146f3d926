"""Cached prompt tokens of a request trace, from the pool and from a host tier below it, by what the tier is given.

    python -m bench.engine.tiers.host_tier conversation_trace.jsonl --pool 4000 --slots 16000 [--limit 4000]

Replays the prompts of a Mooncake trace in order of arrival through the product's prefix cache, page tables, tier policy
and mover. A page is a block of the trace and has eight bytes. Counts pages, so figures are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.engine.tiers.controller import TierController
from baton.kv.keys import page_keys
from baton.kv.memory import PageMemory
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine
from baton.kv.tiers.lower_tier import TierUse
from baton.kv.tiers.tier import CacheTier
from baton.services.cli.bench.workload.traces import read_mooncake
from baton.settings.tiers import TierWrite
from baton.transfer.digest import PoolHasher
from baton.transfer.host_tier.mover import HostMover

PAGE_BYTES = 8


@dataclass(frozen=True)
class TierShares:
    """Shares of all blocks that the pool and the host tier had; blocks copied into the tier, a block of the trace."""

    device: float
    host: float
    written: float


class _CountingMover(HostMover):
    num_written = 0

    def write(self, *args: object) -> None:
        self.num_written += 1
        super().write(*args)  # type: ignore[arg-type]


def replay(prompts: Sequence[Sequence[int]], num_pages: int, num_slots: int, write: TierWrite) -> TierShares:
    """Serves the prompts one after another."""
    memory = PageMemory(num_pages, PAGE_BYTES)
    cache = PrefixCache(PagePool(num_pages), PoolHasher(memory))
    quarantine, mover = Quarantine(cache), _CountingMover(PageMemory(num_slots, PAGE_BYTES))
    tier = TierController(CacheTier(num_slots), mover, cache, memory, write, lambda num, first: 0.0)
    cache.on_evict = tier.on_evict
    num_blocks = num_cached = num_host = 0
    for blocks in prompts:
        num_blocks += len(blocks)
        keys = page_keys(tuple(blocks), 1, "")
        tier.poll(quarantine, 0.0)
        tier.prefetch([TierUse(keys, blocks)], 0.0)
        table = PageTable(cache, 1, "", Hold.LIVE)
        num_matched = table.match_tokens(blocks)
        if table.extend(len(blocks)):
            hits = tier.on_admitted(keys[:num_matched]).get("host", 0)
            num_cached, num_host = num_cached + num_matched - hits, num_host + hits
            table.cache_full_pages(blocks, len(blocks))
            tier.on_filled(keys, num_matched)
        table.release()
    return TierShares(num_cached / num_blocks, num_host / num_blocks, mover.num_written / num_blocks)


def table(prompts: Sequence[Sequence[int]], num_pages: int, num_slots: Sequence[int]) -> list[str]:
    """The shares as lines of a Markdown table."""
    lines = [
        "| slots | written | from the pool | from the host | together | copies a block |",
        "|---|---|---|---|---|---|",
    ]
    for slots in num_slots:
        for write in (TierWrite.SELECTIVE, TierWrite.BACK, TierWrite.THROUGH):
            found = replay(prompts, num_pages, slots, write)
            shares = f"{found.device:.1%} | {found.host:.1%} | {found.device + found.host:.1%} | {found.written:.2f}"
            lines.append(f"| {slots:,} | {write.value} | {shares} |")
    return lines


def main() -> None:
    """Prints the table of one trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pool", type=int, default=4000)
    parser.add_argument("--slots", type=int, nargs="+", default=[4000, 16000])
    parser.add_argument("--limit", type=int, help="prompts to replay; default: all")
    options = parser.parse_args()
    prompts = [row.block_ids for row in read_mooncake(options.trace)][: options.limit]
    without = replay(prompts, options.pool, 1, TierWrite.NONE)
    print(f"{len(prompts):,} prompts, a pool of {options.pool:,} pages; without a tier {without.device:.1%}\n")
    print("\n".join(table(prompts, options.pool, options.slots)))


if __name__ == "__main__":
    main()
