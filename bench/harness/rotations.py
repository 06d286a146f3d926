"""Interleaved arms: every rotation runs each arm once in a random order, between two readings of a probe.

Called by the experiments. Only ratios inside one rotation mean anything on a machine with neighbours; a rotation in
which the machine changed is dropped, and how many were kept is part of every report.
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

from services.cli.bench.results.intervals import Interval, bootstrap_median, is_steady

MAX_WALL_OVER_CPU = 1.05
"""Wall time over CPU time of computing that was left alone."""


@dataclass(frozen=True, slots=True)
class TimedSamples:
    """Seconds of something that only computes, sample by sample: on the wall's clock, and of its thread's CPU."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


Arm = Callable[[], Sequence[float] | TimedSamples]
ExclusiveArms = Callable[[int], AbstractContextManager[Mapping[str, Arm]]]
"""The arms of something that runs only while the context lasts, for the rotation of that number."""

OnRotation = Callable[[Sequence["Block"]], None]
FindingsOf = Callable[[Sequence["Block"]], Sequence["Finding"]]


@dataclass(frozen=True, slots=True)
class Block:
    """One arm in one rotation. `values`: what was measured, sample by sample, in the experiment's unit.

    `cpu_s`: for an arm that returned `TimedSamples`, whose wall times are the values, their CPU times; otherwise empty.
    """

    rotation: int
    arm: str
    probe_before: float
    probe_after: float
    values: tuple[float, ...]
    cpu_s: tuple[float, ...] = ()

    @property
    def probe(self) -> float:
        """The machine during the block."""
        return (self.probe_before + self.probe_after) / 2.0

    @property
    def is_steady(self) -> bool:
        """Whether the machine stayed the same around the block, and computed it without many interruptions."""
        return self.has_steady_probe and self.wall_over_cpu <= MAX_WALL_OVER_CPU

    @property
    def has_steady_probe(self) -> bool:
        """Whether the machine stayed the same around the block, which is enough for CPU times."""
        return is_steady(self.probe_before, self.probe_after)

    @property
    def wall_over_cpu(self) -> float:
        """Median of wall over CPU time; 1 where CPU time was not taken."""
        pairs = zip(self.values, self.cpu_s, strict=True) if self.cpu_s else [(1.0, 1.0)]
        return statistics.median(wall_s / cpu_s for wall_s, cpu_s in pairs)


@dataclass(frozen=True, slots=True)
class Remark:
    """Something about a run that a reader has to know: the machine, a flag, what was left out and why."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of an experiment's table: over all rotations, and over those in which the machine was steady."""

    name: str
    unit: str
    num_rotations: int
    num_steady: int
    overall: Interval
    steady: Interval | None


def command_remark(module: str) -> Remark:
    """The command line of this process, as it can be given again."""
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
    """All blocks in the order they ran. `probe` is given the arm's name and returns its baseline.

    `on_rotation` is given all blocks so far after every rotation.
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
    """As `rotate`, for what cannot run side by side: in a rotation each turn, in a random order, runs all of its arms.

    A turn that fails has no block in that rotation; `on_failure` is told the rotation, the turn and why, and may raise.
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
    """The median, with its interval, of `figure` of each rotation's blocks of `arms`, given in that order.

    A rotation counts when it has all of these blocks, and is kept when `keep` holds for them. Raises `ValueError` when
    none counts.
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
    """For the terminal."""
    table = Table("", "unit", "all rotations", "steady rotations", "kept")
    for found in findings:
        share = f"{found.num_steady}/{found.num_rotations}"
        table.add_row(found.name, found.unit, _format(found.overall), _format(found.steady), share)
    return table


def _format(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.median:.4g} [{interval.low:.4g}, {interval.high:.4g}]"


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A run's file, written anew after every rotation: a run that is ended early loses no whole one.

    `path`: None for a run that is not kept. `num_planned`: rotations asked for.
    """

    path: Path | None
    experiment: str
    num_planned: int
    findings_of: FindingsOf
    remarks: Sequence[Remark] = ()

    def write(self, blocks: Sequence[Block]) -> None:
        """Saves whole rotations and what is found in them. Raises `OSError`."""
        if self.path is not None:
            save(self.path, self.experiment, blocks, self.findings_of(blocks), self.remarks, self.num_planned)


class ResultSeries:
    """Several experiments one after another in one run and one file, which is written after every rotation of each."""

    def __init__(self, path: Path | None, experiment: str, num_planned: int, remarks: Sequence[Remark]) -> None:
        self._path = path
        self._experiment = experiment
        self._num_planned = num_planned
        self._remarks = remarks
        self._blocks: list[Block] = []
        self.findings: list[Finding] = []

    def on_rotation(self, findings_of: FindingsOf) -> OnRotation:
        """For the rotations of the next one: saves what there is, this one's whole rotations included."""

        def keep(blocks: Sequence[Block]) -> None:
            if self._path is not None:
                all_blocks, findings = [*self._blocks, *blocks], [*self.findings, *findings_of(blocks)]
                save(self._path, self._experiment, all_blocks, findings, self._remarks, self._num_planned)

        return keep

    def add(self, blocks: Sequence[Block], findings_of: FindingsOf) -> None:
        """One has ended."""
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
    """One JSON: every block with every sample, and what was found. A reader finds the old file or the new one.

    Raises `OSError`.
    """
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
    """Writes a file or, if the process ends meanwhile, leaves the one that was there. Raises `OSError`."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    os.replace(new, path)
