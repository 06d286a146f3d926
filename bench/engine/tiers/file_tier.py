"""Cached prompt tokens of a request trace after a restart in its middle, by the tier that was below the pool.

    python -m bench.engine.tiers.file_tier conversation_trace.jsonl --pool 4000 --slots 16000 [--limit 4000]

Replays the first half of a Mooncake trace as `host_tier` does. Then the process starts anew: pool and host memory are
lost, and a file tier has what its index holds. The shares are those of the second half. Counts pages: figures are the
same on every machine. The bytes of slots are in memory here; what a disk costs in time is not measured.
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
class RestartShares:
    """Shares of the second half's blocks from pool and tier, and of the first tenth of it; copies a block of all."""

    device: float
    tier: float
    first_tenth: float
    written: float


def replay(
    prompts: Sequence[Sequence[int]], num_pages: int, num_slots: int, write: TierWrite, *, keeps: bool
) -> RestartShares:
    """Serves the prompts one after another, with a restart in the middle that the tier outlives if it `keeps`."""
    half = len(prompts) // 2
    before = TieredReplay(num_pages, num_slots, write)
    before.serve(prompts[:half])
    after = before.restarted(keeps=keeps)
    tenth = max(1, len(prompts[half:]) // 10)
    after.serve(prompts[half : half + tenth])
    first = (after.num_device + after.num_tier) / after.num_blocks
    after.serve(prompts[half + tenth :])
    num_blocks, written = after.num_blocks, before.num_written + after.num_written
    return RestartShares(
        after.num_device / num_blocks, after.num_tier / num_blocks, first, written / (before.num_blocks + num_blocks)
    )


def table(prompts: Sequence[Sequence[int]], num_pages: int, num_slots: int) -> list[str]:
    """The shares as lines of a Markdown table."""
    arms = [("none", TierWrite.NONE, False), ("host, back", TierWrite.BACK, False)]
    arms += [
        (f"file, {write.value}", write, True) for write in (TierWrite.SELECTIVE, TierWrite.BACK, TierWrite.THROUGH)
    ]
    lines = [
        "| tier | from the pool | from the tier | together | together, first tenth | copies a block |",
        "|---|---|---|---|---|---|",
    ]
    for name, write, keeps in arms:
        found = replay(prompts, num_pages, num_slots if write is not TierWrite.NONE else 1, write, keeps=keeps)
        together = f"{found.device + found.tier:.1%} | {found.first_tenth:.1%} | {found.written:.2f}"
        lines.append(f"| {name} | {found.device:.1%} | {found.tier:.1%} | {together} |")
    return lines


def main() -> None:
    """Prints the table of one trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pool", type=int, default=4000)
    parser.add_argument("--slots", type=int, default=16000)
    parser.add_argument("--limit", type=int, help="prompts to replay; default: all")
    options = parser.parse_args()
    prompts = [row.block_ids for row in read_mooncake(options.trace)][: options.limit]
    print(f"{len(prompts):,} prompts, a pool of {options.pool:,} pages, {options.slots:,} slots\n")
    print("\n".join(table(prompts, options.pool, options.slots)))


if __name__ == "__main__":
    main()
