"""A router pauses for longer than its lease while something happens to the store: its answer comes whole, once.

The issue's own order is among them: SIGSTOP for 2.5 s, all data lost, a claim by the other router, SIGCONT.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.domain.ids import RequestId
from simulation.nodes.lua_store import LuaStore
from simulation.policies import PolicyClasses
from simulation.report import describe
from simulation.run import RunResult, run
from simulation.scenario import BEGIN_S, STORE, ClientPlan, FaultPlan, Noise, Scenario, SimFaultKind
from simulation.scenario_generator import generate_scenario
from tests.simulation import planted_bugs

PAUSE_S = 2.5
"""More than two leases."""

STEP_S = 0.25
NUM_TOKENS = 16
PAUSES_AFTER_S = (0.15, 1.2, 2.4)
"""Begins of the pause: when all clients have their ids, in the answer, and at its end."""

LOSSES_AFTER_S = (0.3, 1.7, 2.6)
"""Begins of the store's fault, after that of the pause: before a claim, after it, and when the pause is over."""

KINDS = {
    "emptied": (SimFaultKind.WIPE, 0.0),
    "rolled back": (SimFaultKind.ROLL_BACK, 0.6),
    "killed": (SimFaultKind.KILL, 0.5),
    "silent": (SimFaultKind.FREEZE, 1.5),
}


def scenario(kind: str, pause_after_s: float, loss_after_s: float, num_clients: int = 3) -> Scenario:
    """Clients of router-0, which pauses. Those that lose patience read on at router-1, which lives."""
    fault, duration_s = KINDS[kind]
    begin = BEGIN_S + pause_after_s
    pause = FaultPlan(SimFaultKind.FREEZE, begin, PAUSE_S, "router-0")
    loss = FaultPlan(fault, max(BEGIN_S, begin + loss_after_s), duration_s, STORE)
    clients = tuple(
        ClientPlan(
            RequestId(f"r{n}"), BEGIN_S, (n, 1, 2), NUM_TOKENS, n, "router-0", patience_s=1.0 if n else None,
            returns=True,
        )
        for n in range(num_clients)
    )  # fmt: skip
    quiet = replace(generate_scenario(0), num_routers=2, num_prefills=1, num_decodes=1, noise=Noise(), deadline_s=20.0)
    # The steps of other draws are longer: a client would have no id when its patience ends.
    quiet = replace(quiet, link_sessions=False, num_window_slots=None)
    return replace(quiet, mean_step_s=STEP_S, clients=clients, faults=(pause, loss))


def texts(result: RunResult) -> list[str]:
    return [entry.text for entry in result.trace.entries]


def runs(kind: str, policies: PolicyClasses, losses: tuple[float, ...] = LOSSES_AFTER_S) -> Iterator[RunResult]:
    return (run(scenario(kind, pause, loss), policies) for pause in PAUSES_AFTER_S for loss in losses)


@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_router_and_a_fault_of_the_store_lose_no_answer(kind: str):
    results = list(runs(kind, PolicyClasses()))
    for result in results:
        assert result.violation is None, describe(result)
        assert [outcome.split(" ", 1)[1] for outcome in result.outcomes] == ["finished "] * len(result.outcomes), (
            describe(result)
        )
    seen = [text for result in results for text in texts(result)]
    assert any(text.startswith("log call_claimed") for text in seen)
    assert any(text.startswith("comes back to router-1") for text in seen)
    if kind != "silent":
        assert any(text.startswith("log store_reset") for text in seen)


@pytest.mark.parametrize("kind", ["emptied", "rolled back"])
def test_the_same_holds_over_the_scripts_of_redis(kind: str):
    for result in runs(kind, PolicyClasses(store=LuaStore), LOSSES_AFTER_S[1:2]):
        assert result.violation is None, describe(result)
        assert {outcome.split(" ", 1)[1] for outcome in result.outcomes} == {"finished "}, describe(result)


def test_a_store_that_takes_lower_ballots_is_found():
    policies = PolicyClasses(store=planted_bugs.PutsLowerBallots)
    violations = (result.violation for result in runs("rolled back", policies, LOSSES_AFTER_S[2:]))
    found = next((violation for violation in violations if violation is not None), None)
    assert found is not None
    assert found.rule == "I3", str(found)
