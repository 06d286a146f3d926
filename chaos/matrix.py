"""One cell: a phase is reached, a fault comes, everybody's answer is judged, and the cluster must be whole again.

    reach the phase -> strike -> ask a newcomer -> wait for every answer (and at most the fault's time) -> undo
    -> every process in service, no page held, no request open -> judge answers, and histories against the book

`tests/chaos` plays a few cells on one cluster, `python -m chaos matrix` all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.client import End
from chaos.cluster import NotInTime
from chaos.faults import Fault, calm_book, makes_sense, strike
from chaos.flipper import FlipBudget
from chaos.phases import NARROW, Phase, reach
from chaos.questions import ALL, SHORT
from chaos.stage import Run, Scene, Stage
from chaos.witness import Witness

ANSWER_TIMEOUT_S = 90.0
IDLE_TIMEOUT_S = 20.0
SERVICE_TIMEOUT_S = 120.0
# A newcomer may be told to come back while workers are away. Nobody who was accepted may be told that.
NEWCOMER_CODES = frozenset({"no_workers", "overloaded", "draining"})


@dataclass(frozen=True, slots=True)
class Cell:
    """A phase and a fault."""

    phase: Phase
    fault: Fault

    def __str__(self) -> str:
        return f"{self.phase.value} x {self.fault.value}"


@dataclass(frozen=True, slots=True)
class CellResult:
    """`problems` empty: passed. `longest_gap_s`: the longest silence of a client that was answered.

    `settled_s`: from the end of the fault until nothing was held and everybody was in service.
    """

    cell: Cell
    problems: tuple[str, ...]
    num_answers: int
    num_resumes: int
    longest_gap_s: float
    settled_s: float
    wall_s: float


def all_cells(transport: str) -> list[Cell]:
    """Every pair that means something."""
    return [Cell(phase, fault) for fault in Fault for phase in Phase if makes_sense(phase, fault, transport)]


async def prepare(stage: Stage) -> None:
    """Teaches the oracle; everything is asked at the first router."""
    router = stage.cluster.names("router")[0]
    await stage.oracle.learn(stage.client, stage.cluster.processes[router].url, ALL)
    await stage.cluster.wait_idle(IDLE_TIMEOUT_S)


async def play(cell: Cell, stage: Stage) -> CellResult:
    """Plays a cell on a cluster that is whole. Leaves it whole, or says in `problems` that it is not."""
    began_s = time.monotonic()
    witness = Witness(stage.cluster.book)
    problems: list[str] = []
    watching = asyncio.create_task(witness.watch(stage.transcripts))
    try:
        problems += await _act(cell, stage, witness)
    except (NotInTime, TimeoutError) as late:
        problems.append(f"the phase was not reached: {late}")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    runs = await stage.dismiss()
    ended_s = time.monotonic()
    problems += await _make_whole(stage)
    settled_s = time.monotonic() - ended_s
    problems += await witness.contradictions([run.transcript for run in runs])
    return CellResult(
        cell=cell,
        problems=tuple(problems),
        num_answers=sum(run.transcript.end is End.DONE for run in runs),
        num_resumes=sum(run.transcript.num_resumes for run in runs),
        longest_gap_s=max((r.transcript.longest_gap_s for r in runs if r.transcript.end is End.DONE), default=0.0),
        settled_s=settled_s,
        wall_s=time.monotonic() - began_s,
    )


async def _act(cell: Cell, stage: Stage, witness: Witness) -> list[str]:
    """Phase, fault, newcomers and answers; what is wrong with them. Raises `NotInTime` or `TimeoutError`."""
    scene = await reach(cell.phase, stage)
    budget = await _strike(cell, stage, scene)
    if cell.fault.loses_the_book:
        witness.forget()
    newcomers = [stage.ask(stage.fresh(SHORT), scene.bystander)]
    newcomers += await _wait_for_answers(cell, stage, scene, newcomers)
    return _judge(cell, stage, scene, newcomers, budget)


async def _strike(cell: Cell, stage: Stage, scene: Scene) -> FlipBudget | None:
    """The fault, and then what made the phase long enough ends, but where the fault has its own condition."""
    budget = await strike(cell.fault, stage, scene)
    stage.cluster.network.end(NARROW)
    return budget


async def _wait_for_answers(cell: Cell, stage: Stage, scene: Scene, newcomers: Sequence[Run]) -> list[Run]:
    """Until all have ended. A fault that lasts is over after its time at most; those of the reception book last all of
    it, so that it is missed for longer than an announcement is believed, and another newcomer comes at its end."""
    tasks = [run.task for run in (*scene.runs, *newcomers)]
    late: list[Run] = []
    if cell.fault.of_the_book and cell.fault.ends:
        await asyncio.sleep(stage.book_hold_s)  # the fault itself
        late = [stage.ask(stage.fresh(SHORT), router) for router in stage.cluster.names("router")]
        tasks += [run.task for run in late]
    await asyncio.wait(tasks, timeout=stage.hold_s)
    if cell.fault.ends or cell.fault is Fault.KILL_BOOK:
        await _undo(stage)
    await asyncio.wait(tasks, timeout=ANSWER_TIMEOUT_S)
    return late


def _judge(cell: Cell, stage: Stage, scene: Scene, newcomers: Sequence[Run], budget: FlipBudget | None) -> list[str]:
    problems = [problem for run in scene.runs for problem in stage.oracle.judge(run.transcript)]
    codes = frozenset() if cell.fault.of_the_book else NEWCOMER_CODES
    for newcomer in newcomers:
        problems += [f"newcomer: {problem}" for problem in stage.oracle.judge(newcomer.transcript, codes)]
    if budget is not None and budget.num_flipped == 0:
        problems.append("no bit was flipped: the cell proves nothing")
    return problems


async def _undo(stage: Stage) -> None:
    await stage.cluster.revive()
    await calm_book(stage)


async def _make_whole(stage: Stage) -> list[str]:
    """Undoes the fault, and says what does not come back."""
    cluster = stage.cluster
    await _undo(stage)
    problems = cluster.unasked_deaths()
    for wait, timeout_s in ((cluster.wait_in_service, SERVICE_TIMEOUT_S), (cluster.wait_idle, IDLE_TIMEOUT_S)):
        try:
            await wait(timeout_s)
        except NotInTime as late:
            problems.append(str(late))
    recomputed = {
        name: gauges.sum("baton_tokens_recomputed_total")
        for name, gauges in (await cluster.all_gauges("decode")).items()
    }
    problems += [f"{name} computed {num:g} prompt tokens again" for name, num in recomputed.items() if num]
    return problems
