"""One cell: reaches a phase, injects a fault, checks every answer, and checks that the cluster is whole again.

    reach the phase -> inject the fault -> start a newcomer -> wait for every answer (and at most the fault's time) ->
    undo -> every process in service, no page held, no request open -> check answers, and histories against the store

`tests/chaos` runs a few cells on one cluster, `python -m chaos matrix` all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.checks.store_watcher import StoreWatcher
from chaos.clients.client import StreamEnd
from chaos.clients.pictures import IMAGE_REQUESTS
from chaos.clients.requests import ALL, FIRST_TURN, SHORT, second_turn
from chaos.faults import STRANGERS, ClusterFault, inject_fault, is_applicable, restore_redis_memory
from chaos.harness import ChaosHarness, ClientRun, PhaseContext
from chaos.image_phases import end_slow_links
from chaos.phases import THROTTLED, RequestPhase, follow_request, reach_phase
from chaos.store_faults import take_snapshot
from chaos.strangers import end_intruders
from chaos.testbed.bit_flipper import FlipBudget
from chaos.testbed.cluster import WaitTimeout

ANSWER_TIMEOUT_S = 90.0
IDLE_TIMEOUT_S = 20.0
SERVICE_TIMEOUT_S = 120.0
# A new client may be refused while workers are away. An admitted request may not end with these codes.
NEW_RUN_CODES = frozenset({"no_workers", "overloaded", "draining"})
TAKEOVER_S = 1.5
"""Time after which a stopped router's calls belong to another router, and clients follow them there."""
HARMLESS_FAULTS = STRANGERS | {ClusterFault.SILENT_CLIENTS, ClusterFault.JUMP_FORWARD, ClusterFault.JUMP_BACK}
"""Faults that may delay new clients, but refuse none."""
PAIR_GAP_S = 2.5
"""Longer than two leases of a router, so that another one takes its calls over."""
SINGLE_PHASES = tuple(phase for phase in RequestPhase if phase is not RequestPhase.STREAMING)
PAIR_PHASES = (RequestPhase.PREFILLING, RequestPhase.STREAMING)
_PROCESS_FAULTS = (
    ClusterFault.STOP_ROUTER, ClusterFault.KILL_ROUTER, ClusterFault.KILL_PREFILL, ClusterFault.KILL_DECODE,
    ClusterFault.PARTITION_WORKERS,
)  # fmt: skip
_STORE_FAULTS = (
    ClusterFault.EMPTY_REDIS, ClusterFault.KILL_REDIS, ClusterFault.ROLL_BACK_REDIS, ClusterFault.PARTITION_REDIS,
    ClusterFault.FULL_REDIS,
)  # fmt: skip
FAULT_PAIRS = (
    *itertools.product(_PROCESS_FAULTS, _STORE_FAULTS),
    (ClusterFault.KILL_PREFILL, ClusterFault.KILL_DECODE),
    (ClusterFault.KILL_DECODE, ClusterFault.KILL_DECODE),
    (ClusterFault.STOP_ROUTER, ClusterFault.KILL_DECODE),
    (ClusterFault.FLIP_ALWAYS, ClusterFault.KILL_ROUTER),
    (ClusterFault.KILL_ROUTER, ClusterFault.KILL_DECODE),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A phase and a fault, or two: `second` comes `PAIR_GAP_S` after the first, which then lasts on.

    A process that the first fault stopped continues right after the second: it wakes in a changed world.
    """

    phase: RequestPhase
    fault: ClusterFault
    second: ClusterFault | None = None

    def __str__(self) -> str:
        return f"{self.phase.value} x {self.fault_name}"

    @property
    def faults(self) -> tuple[ClusterFault, ...]:
        return (self.fault,) if self.second is None else (self.fault, self.second)

    @property
    def fault_name(self) -> str:
        return " + ".join(fault.value for fault in self.faults)

    @property
    def loses_store(self) -> bool:
        return any(fault.loses_store for fault in self.faults)

    @property
    def is_redis_fault(self) -> bool:
        """True if it concerns Redis alone, so no request may be refused."""
        return all(fault.is_redis_fault for fault in self.faults)

    @property
    def allowed_codes(self) -> frozenset[str]:
        """Codes with which new clients may be refused."""
        serves_all = self.is_redis_fault or set(self.faults) <= HARMLESS_FAULTS
        return frozenset() if serves_all else NEW_RUN_CODES


@dataclass(frozen=True, slots=True)
class CellResult:
    """`problems` empty: passed. `longest_gap_s`: the longest silence of an answered client.

    `settled_s`: from the end of the fault until nothing was held and every process was in service.
    """

    cell: Cell
    problems: tuple[str, ...]
    num_answers: int
    num_resumes: int
    num_dropped: int
    longest_gap_s: float
    settled_s: float
    wall_s: float


def all_cells(transport: str) -> list[Cell]:
    """All cells: pairs of a phase and a fault that can hit it, and the pairs of faults."""
    single = [
        Cell(phase, fault)
        for fault in ClusterFault
        for phase in SINGLE_PHASES
        if is_applicable(phase, fault, transport)
    ]
    double = [
        Cell(phase, first, second)
        for first, second in FAULT_PAIRS
        for phase in PAIR_PHASES
        if is_applicable(phase, first, transport) and is_applicable(phase, second, transport)
    ]
    return single + double


async def prepare(harness: ChaosHarness) -> None:
    """Learns the undisturbed answers at the first router."""
    url = harness.cluster.processes[harness.cluster.names("router")[0]].url
    if harness.cluster.shape.num_encode:
        await harness.oracle.record_answers(harness.client, url, IMAGE_REQUESTS)
        await harness.cluster.wait_idle(IDLE_TIMEOUT_S)
        return
    await harness.oracle.record_answers(harness.client, url, ALL)
    (answer,) = harness.oracle.answer(FIRST_TURN).choices
    await harness.oracle.record_answers(harness.client, url, [second_turn(answer.tokens)])
    await harness.cluster.wait_idle(IDLE_TIMEOUT_S)


async def run_cell(cell: Cell, harness: ChaosHarness) -> CellResult:
    """Runs a cell on a whole cluster. Leaves it whole, or reports in `problems` that it is not."""
    began_s = time.monotonic()
    watcher = StoreWatcher(harness.cluster.store)
    problems: list[str] = []
    watching = asyncio.create_task(watcher.watch(harness.transcripts))
    try:
        problems += await _run_phases(cell, harness, watcher)
    except (WaitTimeout, TimeoutError) as late:
        problems.append(f"the phase was not reached: {late}")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    runs = await harness.hang_up_all()
    ended_s = time.monotonic()
    problems += await _recover_and_check(harness)
    settled_s = time.monotonic() - ended_s
    problems += await watcher.contradictions([run.transcript for run in runs])
    return CellResult(
        cell=cell,
        problems=tuple(problems),
        num_answers=sum(run.transcript.end is StreamEnd.DONE for run in runs),
        num_resumes=sum(run.transcript.num_resumes for run in runs),
        num_dropped=sum(len(run.transcript.dropped) for run in runs),
        longest_gap_s=max(
            (r.transcript.longest_gap_s for r in runs if r.transcript.end is StreamEnd.DONE), default=0.0
        ),
        settled_s=settled_s,
        wall_s=time.monotonic() - began_s,
    )


async def _run_phases(cell: Cell, harness: ChaosHarness, watcher: StoreWatcher) -> list[str]:
    """Runs phase, fault, new clients and answers, and returns the problems. Raises `WaitTimeout` or `TimeoutError`."""
    context = await reach_phase(cell.phase, harness)
    budget = await _inject(cell, harness, context)
    if cell.loses_store:
        watcher.clear()
    newcomers = IMAGE_REQUESTS if cell.phase.has_image else (SHORT,)
    new_runs = [harness.ask(harness.with_fresh_salt(each), context.other_router) for each in newcomers]
    new_runs += await _wait_for_answers(cell, harness, context, new_runs)
    return _check(cell, harness, context, new_runs, budget)


async def _inject(cell: Cell, harness: ChaosHarness, context: PhaseContext) -> FlipBudget | None:
    """Injects the fault, then ends the condition that held the phase, unless the fault has a condition of its own."""
    if cell.second is ClusterFault.ROLL_BACK_REDIS:
        context.snapshot = await take_snapshot(harness.cluster)
    budget = await inject_fault(cell.fault, harness, context)
    if cell.second is not None:
        await asyncio.sleep(TAKEOVER_S)  # the first fault alone
        if cell.fault is ClusterFault.STOP_ROUTER:
            context.runs += [
                harness.follow(run, context.other_router) for run in context.runs if run.transcript.call_id
            ]
        await asyncio.sleep(PAIR_GAP_S - TAKEOVER_S)
        await follow_request(harness, context)
        budget = await inject_fault(cell.second, harness, context) or budget
        harness.cluster.resume_stopped()
    harness.cluster.network.end(THROTTLED)
    end_slow_links(harness)
    return budget


async def _wait_for_answers(
    cell: Cell, harness: ChaosHarness, context: PhaseContext, new_runs: Sequence[ClientRun]
) -> list[ClientRun]:
    """Waits until all clients have ended. A lasting fault ends after its time at the latest; so does the death of the
    last process of a role, as under a supervisor. A fault of the state store lasts for all of it, longer than the TTL
    of a registration, and another newcomer follows at its end."""
    tasks = [run.task for run in (*context.runs, *new_runs)]
    late: list[ClientRun] = []
    if cell.is_redis_fault and any(fault.is_transient for fault in cell.faults):
        await asyncio.sleep(harness.redis_hold_s)  # the fault itself
        late = [harness.ask(harness.with_fresh_salt(SHORT), router) for router in harness.cluster.names("router")]
        tasks += [run.task for run in late]
    await asyncio.wait(tasks, timeout=harness.hold_s)
    needs_end = any(fault.is_transient or fault is ClusterFault.KILL_REDIS for fault in cell.faults)
    if needs_end or harness.cluster.dead_roles():
        await _recover(harness)
    await asyncio.wait(tasks, timeout=ANSWER_TIMEOUT_S)
    return late


def _check(
    cell: Cell, harness: ChaosHarness, context: PhaseContext, new_runs: Sequence[ClientRun], budget: FlipBudget | None
) -> list[str]:
    problems = [problem for run in context.runs for problem in harness.oracle.check(run.transcript)]
    for new_run in new_runs:
        found = harness.oracle.check(new_run.transcript, cell.allowed_codes)
        problems += [f"new client: {problem}" for problem in found]
    if budget is not None and budget.num_flipped == 0:
        problems.append("no bit was flipped: the cell proves nothing")
    return problems


async def _recover(harness: ChaosHarness) -> None:
    await harness.cluster.recover()
    await restore_redis_memory(harness)
    await end_intruders(harness)


async def _recover_and_check(harness: ChaosHarness) -> list[str]:
    """Undoes the fault and returns what does not recover."""
    cluster = harness.cluster
    await _recover(harness)
    problems = cluster.unexpected_exits()
    for wait, timeout_s in ((cluster.wait_in_service, SERVICE_TIMEOUT_S), (cluster.wait_idle, IDLE_TIMEOUT_S)):
        try:
            await wait(timeout_s)
        except WaitTimeout as late:
            problems.append(str(late))
    recomputed = {
        name: metrics.sum("baton_tokens_recomputed_total")
        for name, metrics in (await cluster.all_metrics("decode")).items()
    }
    problems += [f"{name} computed {num:g} prompt tokens again" for name, num in recomputed.items() if num]
    return problems
