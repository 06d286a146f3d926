"""Attempts that stay silent while all is well are found, and queues, faults and slow steps are no silence."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId, RequestId
from baton.worker.handoff.handoff_ends import HandoffEnds
from baton.worker.handoff.handoff_log import HandoffLog
from simulation.checks.invariants import Violation, check_no_tasks
from simulation.checks.silence import RULE, check_silence, max_silence_s
from simulation.policies import CONFIG, PolicyClasses
from simulation.report import describe
from simulation.run import run
from simulation.runtime.trace import Trace, TraceEntry
from simulation.scenario import BEGIN_S, ClientPlan, FaultPlan, Noise, Scenario, SimFaultKind
from simulation.scenario_generator import generate_scenario

ID = RequestId("r0")
CLIENT = ClientPlan(ID, BEGIN_S, (0, 1, 2, 0, 1), 8, 1)
QUIET = replace(
    generate_scenario(0), num_routers=1, num_prefills=1, num_decodes=2, noise=Noise(), mean_step_s=0.01,
    deadline_s=20.0, num_local_prefill=0, clients=(CLIENT,), faults=(),
)  # fmt: skip
MAX_S = max_silence_s(QUIET)
LATE_S = 2.0 + MAX_S + 0.1
"""An event after the longest silence that begins at 2 s."""


class NoEnds(HandoffEnds):
    """Remembers no end, and not that it has forgotten one."""

    def remember(self, id: AttemptId, end: BatonError, now: float) -> None:
        pass


class ForgetsEndsOfExports(HandoffLog):
    """A watch of an ended export gets no answer."""

    def __init__(self, is_coming: Callable[[AttemptId], bool]) -> None:
        super().__init__(is_coming, NoEnds())


def state(at_s: float, state: str, router: str = "router-0") -> TraceEntry:
    return TraceEntry(at_s, router, f"log request_state request_id={ID} attempt=1 before=any state={state}", ID)


def effect(at_s: float, text: str = "EmitTokens r0/1", worker: str = "decode-0") -> TraceEntry:
    return TraceEntry(at_s, worker, text, ID)


def found(entries: Sequence[TraceEntry], scenario: Scenario = QUIET, *faults: FaultPlan) -> str:
    """The violation's text; "" for none."""
    trace = Trace(lambda: 0.0)
    trace.entries = sorted(entries, key=lambda entry: entry.at_s)
    try:
        check_silence(replace(scenario, faults=faults), trace)
    except Violation as violation:
        return str(violation) if violation.request_id == ID else "another request"
    return ""


@pytest.mark.parametrize("running", ["reserved", "prefilling", "sealed", "decoding"])
def test_a_running_attempt_may_not_be_silent_for_long(running: str):
    ends = [state(LATE_S, end) for end in ("finished", "failed", "interrupted", "decoding")]
    for end in (*ends, effect(LATE_S)):
        assert found([state(2.0, running), end]).startswith(f"{RULE}: is {running} and silent")
        assert not found([state(2.0, running), effect(3.0), end])


@pytest.mark.parametrize("waiting", ["queued", "interrupted"])
def test_a_request_that_waits_is_not_silent(waiting: str):
    assert not found([state(1.9, "prefilling"), state(2.0, waiting), state(LATE_S, "reserved")])


def test_messages_and_log_lines_are_no_progress():
    noise = [effect(3.0, "log attempt_sealed"), effect(3.0, "Watch r0/1", "decode-0->prefill-0")]
    assert found([state(2.0, "sealed"), *noise, state(LATE_S, "failed")])


def test_an_attempt_ends_with_the_life_of_its_router():
    for end in (
        TraceEntry(2.5, "fault", "kill router-0 at 2.500 s for 1.000 s"),
        TraceEntry(2.5, "router-0", "starts"),
    ):
        assert not found([state(2.0, "sealed"), end, effect(LATE_S)])
    another = TraceEntry(2.5, "router-1", "starts")
    assert found([state(2.0, "sealed"), another, effect(LATE_S)])


def test_slow_steps_lengthen_the_bound():
    slow = replace(QUIET, mean_step_s=0.2)
    assert not found([state(2.0, "prefilling"), effect(LATE_S)], slow)
    assert found([state(2.0, "prefilling"), effect(2.1 + max_silence_s(slow))], slow)


CALL = TraceEntry(2.0, "router-0->decode-0", "Generate r0/1", ID)


@pytest.mark.parametrize(
    ("fault", "excuses"),
    [
        (FaultPlan(SimFaultKind.HANG, 1.0, 1.5, "decode-0"), True),
        (FaultPlan(SimFaultKind.HANG, 1.0, 0.5, "decode-0"), False),
        (FaultPlan(SimFaultKind.HANG, 1.0, 1.5, "decode-1"), False),
        (FaultPlan(SimFaultKind.KILL, 1.0, 0.1, "decode-0"), True),  # half-open until keepalive
        (FaultPlan(SimFaultKind.DRAIN, 1.0, 0.1, "decode-0"), True),  # until it starts again
        (FaultPlan(SimFaultKind.CUT, 2.5, 1.0, "router-0", "decode-0"), True),
        (FaultPlan(SimFaultKind.CUT, 2.5, 1.0, "router-0", "decode-1"), False),
        (FaultPlan(SimFaultKind.FREEZE, 2.5, 1.0, "store"), True),
    ],
)
def test_only_a_fault_among_its_processes_excuses_a_silence(fault: FaultPlan, excuses: bool):
    entries = [state(2.0, "prefilling"), CALL, TraceEntry(2.6, "decode-0", "starts"), state(LATE_S, "failed")]
    assert bool(found(entries, QUIET, fault)) != excuses


def test_a_worker_belongs_to_the_attempt_from_its_reservation_on():
    """Over sessions no other call names the decode worker of a prompt that it computes itself."""
    reserve = TraceEntry(1.9, "router-0->decode-0", "Reserve r0/1", ID)
    frozen = FaultPlan(SimFaultKind.FREEZE, 2.5, 4.0, "decode-0")
    entries = [state(1.8, "queued"), reserve, state(2.0, "reserved"), state(LATE_S, "interrupted")]
    assert not found(entries, QUIET, frozen)
    assert found([reserve, *(entry for entry in entries if entry is not reserve)], QUIET), "all is well"
    assert found([replace(reserve, source="router-0->decode-1"), *entries[2:]], QUIET, frozen)


def test_the_bound_begins_again_after_a_fault():
    fault = FaultPlan(SimFaultKind.HANG, 2.5, 1.0, "decode-0")
    assert not found([state(2.0, "prefilling"), CALL, state(3.4 + MAX_S, "failed")], QUIET, fault)
    assert found([state(2.0, "prefilling"), CALL, state(3.6 + MAX_S, "failed")], QUIET, fault)


def test_lost_and_late_messages_excuse_a_silence():
    deadline = TraceEntry(2.5, "router-0-xdecode-0", "Generate r0/1 deadline", ID)
    assert found([state(2.0, "prefilling"), CALL, deadline, state(LATE_S, "failed")])
    for line in (
        TraceEntry(2.5, "router-0-xdecode-0", "Generate r0/1 the connection broke", ID),
        TraceEntry(2.5, "router-0<->decode-0", "Session -x the connection broke"),
        TraceEntry(2.5, "decode-0|router-0", "late for 0.900 s"),
        TraceEntry(2.5, "decode-0", "late for 0.900 s, a read"),
    ):
        assert not found([state(2.0, "prefilling"), CALL, line, state(LATE_S, "failed")])


def test_a_worker_that_the_router_waited_for_belongs_to_the_attempt():
    """An upload names no request; its router says which worker did not take it (seed 9804999)."""
    cut = FaultPlan(SimFaultKind.CUT, 1.9, MAX_S + 1.0, "router-0", "prefill-2")
    line = f"log worker_suspected worker=prefill-2 code=worker_lost request_id={ID} attempt=1"
    suspected = TraceEntry(LATE_S, "router-0", line, ID)
    assert not found([state(2.0, "prefilling"), suspected, state(LATE_S, "interrupted")], QUIET, cut)
    assert found([state(2.0, "prefilling"), state(LATE_S, "interrupted")], QUIET, cut)
    other = replace(suspected, text=line.replace("prefill-2", "prefill-1"))
    assert found([state(2.0, "prefilling"), other, state(LATE_S, "interrupted")], QUIET, cut)


def test_only_what_links_repeat_may_be_under_way_at_rest():
    """A renewal whose answer is on its way when the run ends is no wait (seed 9805475)."""
    check_no_tasks("prefill-0", ["background", "/baton.v1.Handoff/Renew None"])
    with pytest.raises(Violation, match="still waits in"):
        check_no_tasks("prefill-0", ["/baton.v1.Handoff/Watch r0/1"])


def test_a_deadline_in_an_idle_cluster_without_faults_is_found():
    client = TraceEntry(LATE_S, "client", "failed deadline_exceeded", ID)
    waits = state(2.0, "queued")
    assert "runs out of time" in found([effect(1.0), waits, client])
    assert not found([effect(1.0), waits, effect(3.0, worker="prefill-0"), client])
    assert not found([effect(1.0), waits, client], QUIET, FaultPlan(SimFaultKind.KILL, 1.0, 2.0, "decode-1"))


def test_a_request_may_wait_for_a_model_that_is_gone():
    arrives = TraceEntry(1.0, "client", "arrives, 5 tokens", ID)
    client = TraceEntry(LATE_S + 2.0, "client", "failed deadline_exceeded", ID)
    early, late = (FaultPlan(SimFaultKind.UPGRADE, at_s, 0.1, "decode-1") for at_s in (0.5, 1.5))
    started = TraceEntry(1.9, "decode-1", "starts")
    assert found([arrives, started, client], QUIET, early)
    assert not found([arrives, started, client], QUIET, late)


def test_ends_of_exports_that_are_forgotten_are_found():
    """A watch of an ended export got no answer; no other rule finds it."""
    late = FaultPlan(SimFaultKind.HANG, BEGIN_S - 0.05, CONFIG.lease_s + 0.25, "decode-0")
    scenario = replace(QUIET, num_decodes=1, faults=(late,))
    result = run(scenario, PolicyClasses(handoff_log=ForgetsEndsOfExports))
    assert result.violation is not None
    assert result.violation.rule == RULE, describe(result)
    assert run(scenario).violation is None
