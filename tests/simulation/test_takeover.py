"""Two routers and one long answer: the client gets every token once, whatever happens to its router."""

from dataclasses import replace

import pytest

from baton.domain.ids import RequestId
from simulation.report import describe
from simulation.run import RunResult, run
from simulation.scenario import BEGIN_S, STORE, ClientPlan, FaultPlan, Noise, Scenario, SimFaultKind
from simulation.scenario_generator import generate_scenario

ANSWER_S = 2.8
"""Slightly less than the duration of the answer."""

STEP_S = 0.25


@pytest.fixture(params=[False, True], ids=["call", "session"])
def sessions(request: pytest.FixtureRequest) -> bool:
    """Routers and workers talk in calls, and in sessions (True)."""
    return bool(request.param)


def scenario(sessions: bool, *faults: FaultPlan, returns: bool = True) -> Scenario:
    """A client of router-0."""
    client = ClientPlan(RequestId("r0"), BEGIN_S, (0, 1, 2), 16, 1, "router-0", returns=returns)
    quiet = replace(generate_scenario(0), num_routers=2, num_prefills=1, num_decodes=1, noise=Noise(), deadline_s=8.0)
    return replace(quiet, mean_step_s=STEP_S, clients=(client,), faults=faults, sessions=sessions)


def traced(result: RunResult, beginning: str) -> bool:
    return any(entry.text.startswith(beginning) for entry in result.trace.entries)


@pytest.mark.parametrize("after_s", [n * ANSWER_S / 14 for n in range(14)])
def test_a_killed_router_loses_no_answer(after_s: float, sessions: bool):
    killed = FaultPlan(SimFaultKind.KILL, BEGIN_S + 0.02 + after_s, 3.0, "router-0")
    result = run(scenario(sessions, killed))
    assert result.violation is None, describe(result)
    assert result.outcomes[0] == ("r0 finished " if after_s > 0 else "r0 lost ")
    if after_s > 0:
        assert traced(result, "comes back to router-1")
        assert traced(result, "log call_claimed")


@pytest.mark.parametrize("after_s", [0.1, 0.6, 1.2])
def test_a_router_without_its_store_is_fenced_and_its_client_continues(after_s: float, sessions: bool):
    cut = FaultPlan(SimFaultKind.CUT, BEGIN_S + after_s, 3.0, "router-0", STORE)
    result = run(scenario(sessions, cut, returns=False))
    assert result.violation is None, describe(result)
    assert result.outcomes[0] == "r0 finished "
    assert traced(result, "log call_claimed")
    assert traced(result, "log call_superseded")
    assert not traced(result, "comes back")


@pytest.mark.parametrize(("after_ms", "is_stored"), [(0.5, False), (12.0, True), (16.0, True), (20.0, True)])
def test_a_takeover_uses_an_attempt_that_no_worker_has_seen(after_ms: float, is_stored: bool, sessions: bool):
    """When the router is cut off, a worker has seen attempt 1. A call is stored with its workers.

    So at first the store does not have it, no other router computes it, and its own goes on.
    """
    cut = FaultPlan(SimFaultKind.CUT, BEGIN_S + after_ms / 1000, 3.0, "router-0", STORE)
    result = run(scenario(sessions, cut))
    asked = [entry.text.lower() for entry in result.trace.entries if entry.source == "router-1->decode-0"]
    assert result.violation is None, describe(result)
    assert result.outcomes[0] == "r0 finished "
    assert ("reserve r0/1001" in asked) == is_stored
    assert "reserve r0/1" not in asked


def test_a_drained_router_hands_its_answer_to_another(sessions: bool):
    leaves = FaultPlan(SimFaultKind.DRAIN, BEGIN_S + 0.05, 1.0, "router-0")
    result = run(replace(scenario(sessions, leaves), mean_step_s=0.4))
    assert result.violation is None, describe(result)
    assert result.outcomes[0] == "r0 finished "
    assert traced(result, "comes back to router-1")


def test_a_client_resumes_after_a_lost_connection(sessions: bool):
    undisturbed = scenario(sessions)
    client = replace(undisturbed.clients[0], patience_s=1.0)
    result = run(replace(undisturbed, clients=(client,)))
    assert result.violation is None, describe(result)
    assert result.outcomes[0] == "r0 finished "
    assert traced(result, "loses its connection")
    assert traced(result, "log takeover_started")
