"""Gaps between tokens, what was read over them, and what made the slow ones long. Pure; used by `disturbance`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from baton.services.cli.bench.results.distribution import percentile
from bench.harness.rotations import Block

BUNCHED = 0.1
"""A token that comes within so much of the median gap after another one was made before that one came."""

SLOW = 1.15
"""A gap over so many times the median gap alone is slow."""

CAUSES = ("steal", "waits for a core", "longer steps", "way to the client", "rest")


class GapRecord(NamedTuple):
    """One gap, in seconds: its length, and what was read over it."""

    gap_s: float
    run_s: float
    wait_s: float
    way_wait_s: float
    steal_s: float
    prefill_run_s: float
    others_run_s: float


def records_of(block: Block) -> list[GapRecord]:
    """The inverse of what an arm returns."""
    width = len(GapRecord._fields)
    return [GapRecord(*block.values[at : at + width]) for at in range(0, len(block.values), width)]


class AloneTimes(NamedTuple):
    """Medians over the gaps of a block without prompts, in seconds."""

    gap_s: float
    run_s: float
    wait_s: float
    way_wait_s: float

    @classmethod
    def of(cls, records: Sequence[GapRecord]) -> AloneTimes:
        return cls(*(statistics.median(getattr(record, name) for record in records) for name in cls._fields))


def causes_of(record: GapRecord, alone: AloneTimes, num_steps: int = 1) -> list[float]:
    """Seconds of the gap's excess over the median alone, by cause, in the order of `CAUSES`.

    `num_steps`: whose tokens came at its end. All but one of them were late on their way, for as long as steps take.
    """
    left = max(0.0, record.gap_s - alone.gap_s)
    late_s = (num_steps - 1) * alone.gap_s
    found = []
    for seconds in (
        record.steal_s,
        record.wait_s - num_steps * alone.wait_s,
        record.run_s - num_steps * alone.run_s,
        late_s + max(0.0, record.way_wait_s - alone.way_wait_s),
    ):
        taken = min(left, max(0.0, seconds))
        found.append(taken)
        left -= taken
    return [*found, left]


Bunch = tuple[GapRecord, int]
"""A gap, and the steps whose tokens came at its end."""


def bunches(records: Sequence[GapRecord], alone: AloneTimes) -> list[Bunch]:
    """Each gap with the number of steps whose tokens came at its end; gaps within a bunch are left out."""
    found: list[Bunch] = []
    for record in records:
        if found and record.gap_s < BUNCHED * alone.gap_s:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((record, 1))
    return found


def slow_gaps(records: Sequence[GapRecord], alone: AloneTimes) -> list[Bunch]:
    """Gaps over `SLOW` times the median alone."""
    return [bunch for bunch in bunches(records, alone) if bunch[0].gap_s > SLOW * alone.gap_s]


def tail_gaps(records: Sequence[GapRecord], alone: AloneTimes) -> list[Bunch]:
    """Gaps at or over the 99th percentile of all."""
    bound_s = percentile(sorted(record.gap_s for record in records), 99)
    return [bunch for bunch in bunches(records, alone) if bunch[0].gap_s >= bound_s]


def excess_ms(gaps: Sequence[Bunch], alone: AloneTimes, cause: int) -> float:
    """Milliseconds of a cause in a gap, the mean; 0 without gaps."""
    return 1e3 * statistics.fmean([causes_of(record, alone, steps)[cause] for record, steps in gaps] or [0.0])
