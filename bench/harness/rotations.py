"""Interleaved arms: every rotation runs each arm once in a random order, between two readings of a probe.

Used by the experiments. On a shared machine only ratios inside one rotation are meaningful. A rotation in which the
machine changed does not count as steady, and every report shows the number of steady rotations.
"""

from __future__ import annotations

import datetime
import os
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton.services.cli.bench.results.intervals import Interval, bootstrap_median, is_steady

MAX_WALL_OVER_CPU = 1.05
"""Bound on wall time over CPU time of an undisturbed computation."""


@dataclass(frozen=True, slots=True)
class TimedSamples:
    """Wall time and thread CPU time of each sample of a pure computation, in seconds."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


Arm = Callable[[], Sequence[float] | TimedSamples]
ExclusiveArms = Callable[[int], AbstractContextManager[Mapping[str, Arm]]]
"""Context manager for one rotation, by its number; yields arms that may run only inside it."""

OnRotation = Callable[[Sequence["Block"]], None]
FindingsOf = Callable[[Sequence["Block"]], Sequence["Finding"]]


@dataclass(frozen=True, slots=True)
class Block:
    """One arm in one rotation. `values`: the samples, in the experiment's unit.

    For an arm that returned `TimedSamples`, `values` are wall times and `cpu_s` CPU times; else `cpu_s` is empty.
    """

    rotation: int
    arm: str
    probe_before: float
    probe_after: float
    values: tuple[float, ...]
    cpu_s: tuple[float, ...] = ()

    @property
    def probe(self) -> float:
        """Mean of the two readings around the block."""
        return (self.probe_before + self.probe_after) / 2.0

    @property
    def is_steady(self) -> bool:
        """True if the probes agree and the wall time is close to the CPU time."""
        return self.has_steady_probe and self.wall_over_cpu <= MAX_WALL_OVER_CPU

    @property
    def has_steady_probe(self) -> bool:
        """True if the probes around the block agree; sufficient for CPU times."""
        return is_steady(self.probe_before, self.probe_after)

    @property
    def wall_over_cpu(self) -> float:
        """Median of wall over CPU time; 1 where CPU time was not taken."""
        pairs = zip(self.values, self.cpu_s, strict=True) if self.cpu_s else [(1.0, 1.0)]
        return statistics.median(wall_s / cpu_s for wall_s, cpu_s in pairs)


@dataclass(frozen=True, slots=True)
class Remark:
    """A note on a run for its reader: the machine, a flag, a skipped arm with the reason."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of an experiment's table: over all rotations, and over the steady ones."""

    name: str
    unit: str
    num_rotations: int
    num_steady: int
    overall: Interval
    steady: Interval | None


def command_remark(module: str) -> Remark:
    """The command line of this process, for repeating the run."""
    return Remark("command", shlex.join(["python", "-m", module, *sys.argv[1:]]))


def rotate(
    arms: Mapping[str, Arm],
    probe: Callable[[str], float],
    *,
    num_rotations: int,
    seed: int,
    console: Console,
    on_rotation: OnRotation = lambda blocks: None,
) -> list[Block]:
    """Runs all rotations and returns the blocks in order. `probe` maps an arm's name to a reading of its baseline.

    `on_rotation` receives all blocks so far after every rotation.
    """
    rng = random.Random(seed)
    blocks: list[Block] = []
    for rotation in track(range(num_rotations), "rotations", console=console):
        order = list(arms)
        rng.shuffle(order)
        blocks += [_block(rotation, name, arms[name], probe) for name in order]
        on_rotation(blocks)
    return blocks


def rotate_exclusive(
    turns: Mapping[str, ExclusiveArms],
    probe: Callable[[str], float],
    *,
    num_rotations: int,
    seed: int,
    console: Console,
    on_failure: Callable[[int, str, Exception], None],
    on_rotation: OnRotation = lambda blocks: None,
) -> list[Block]:
    """As `rotate`, for systems that cannot run side by side: each runs all of its arms in its turn.

    A turn that fails adds no block to its rotation; `on_failure` receives rotation, turn and error, and may raise.
    """
    blocks: list[Block] = []
    for rotation in track(range(num_rotations), "rotations", console=console):
        rng = random.Random(f"{seed} {rotation}")
        for name in rng.sample(list(turns), len(turns)):
            try:
                with turns[name](rotation) as arms:
                    order = rng.sample(list(arms), len(arms))
                    taken = [_block(rotation, arm, arms[arm], probe) for arm in order]
            except (RuntimeError, OSError) as error:
                on_failure(rotation, name, error)
            else:
                blocks += taken
        on_rotation(blocks)
    return blocks


def _block(rotation: int, name: str, arm: Arm, probe: Callable[[str], float]) -> Block:
    before = probe(name)
    taken = arm()
    values, cpu_s = (taken.wall_s, taken.cpu_s) if isinstance(taken, TimedSamples) else (tuple(taken), ())
    return Block(rotation, name, before, probe(name), values, cpu_s)


def make_finding(
    name: str,
    unit: str,
    blocks: Sequence[Block],
    arms: Sequence[str],
    figure: Callable[[tuple[Block, ...]], float],
    keep: Callable[[Block], bool] = lambda block: block.is_steady,
) -> Finding:
    """Applies `figure` to each rotation's blocks of `arms` and returns the median with its interval.

    A rotation counts if it has all of these blocks, and is steady if `keep` holds for each. Raises `ValueError` if no
    rotation counts.
    """
    by_place = {(block.rotation, block.arm): block for block in blocks}
    places = [[(rotation, arm) for arm in arms] for rotation in sorted({block.rotation for block in blocks})]
    groups = [
        tuple(by_place[place] for place in group) for group in places if all(place in by_place for place in group)
    ]
    if not groups:
        raise ValueError(f"no rotation has all of {', '.join(arms)}")
    steady = [group for group in groups if all(keep(block) for block in group)]
    return Finding(
        name=name,
        unit=unit,
        num_rotations=len(groups),
        num_steady=len(steady),
        overall=bootstrap_median([figure(group) for group in groups]),
        steady=bootstrap_median([figure(group) for group in steady]) if steady else None,
    )


def table_of(findings: Sequence[Finding]) -> Table:
    """A table for the terminal."""
    table = Table("", "unit", "all rotations", "steady rotations", "kept")
    for found in findings:
        share = f"{found.num_steady}/{found.num_rotations}"
        table.add_row(found.name, found.unit, _format(found.overall), _format(found.steady), share)
    return table


def _format(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.median:.4g} [{interval.low:.4g}, {interval.high:.4g}]"


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A run's file, rewritten after every rotation, so an interrupted run keeps its complete rotations.

    `path`: None for a run that is not saved. `num_planned`: rotations asked for.
    """

    path: Path | None
    experiment: str
    num_planned: int
    findings_of: FindingsOf
    remarks: Sequence[Remark] = ()

    def write(self, blocks: Sequence[Block]) -> None:
        """Saves complete rotations and their findings. Raises `OSError`."""
        if self.path is not None:
            save(self.path, self.experiment, blocks, self.findings_of(blocks), self.remarks, self.num_planned)


class ResultSeries:
    """Several experiments in sequence in one run and one file, rewritten after every rotation."""

    def __init__(self, path: Path | None, experiment: str, num_planned: int, remarks: Sequence[Remark]) -> None:
        self._path = path
        self._experiment = experiment
        self._num_planned = num_planned
        self._remarks = remarks
        self._blocks: list[Block] = []
        self.findings: list[Finding] = []

    def on_rotation(self, findings_of: FindingsOf) -> OnRotation:
        """Callback for the rotations of the next experiment: saves earlier experiments and its complete rotations."""

        def keep(blocks: Sequence[Block]) -> None:
            if self._path is not None:
                all_blocks, findings = [*self._blocks, *blocks], [*self.findings, *findings_of(blocks)]
                save(self._path, self._experiment, all_blocks, findings, self._remarks, self._num_planned)

        return keep

    def add(self, blocks: Sequence[Block], findings_of: FindingsOf) -> None:
        """Adds a finished experiment."""
        self._blocks += blocks
        self.findings += findings_of(blocks)


def save(
    path: Path,
    experiment: str,
    blocks: Sequence[Block],
    findings: Sequence[Finding],
    remarks: Sequence[Remark] = (),
    num_planned: int | None = None,
) -> None:
    """Saves all blocks with their samples, and the findings, as one JSON, atomically. Raises `OSError`."""
    record = {
        "experiment": experiment,
        "ended": datetime.datetime.now(datetime.UTC),
        "num_planned": num_planned,
        "remarks": [asdict(remark) for remark in remarks],
        "findings": [asdict(finding) for finding in findings],
        "blocks": [asdict(block) for block in blocks],
    }
    write_atomically(path, msgspec.json.encode(record))


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file atomically. Raises `OSError`."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    os.replace(new, path)
