"""Cached prompt tokens of a request trace, from the pool and from a host tier below it, by what the tier is given.

    python -m bench.engine.tiers.host_tier conversation_trace.jsonl --pool 4000 --slots 16000 [--limit 4000]

Replays the prompts of a Mooncake trace in order of arrival (`replay`). Counts pages, so figures are the same on every
machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.services.cli.bench.workload.traces import read_mooncake
from baton.settings.tiers import TierWrite
from bench.engine.tiers.replay import TieredReplay


@dataclass(frozen=True)
class TierShares:
    """Shares of all blocks that the pool and the host tier had; blocks copied into the tier, a block of the trace."""

    device: float
    host: float
    written: float


def replay(prompts: Sequence[Sequence[int]], num_pages: int, num_slots: int, write: TierWrite) -> TierShares:
    """Serves the prompts one after another."""
    one = TieredReplay(num_pages, num_slots, write)
    one.serve(prompts)
    return TierShares(one.num_device / one.num_blocks, one.num_tier / one.num_blocks, one.num_written / one.num_blocks)


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
