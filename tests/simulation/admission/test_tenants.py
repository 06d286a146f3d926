"""Tenants in simulated clusters: a flood costs a steady one nothing, and no call is another tenant's, whatever dies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from baton.domain.ids import RequestId
from baton.services.router.admission.admission_queue import AdmissionQueue
from baton.services.router.admission.slot import Slot
from simulation.nodes.router import ADMISSION
from simulation.report import describe
from simulation.run import RunResult, run
from simulation.scenario import BEGIN_S, STORE, ClientPlan, FaultPlan, Noise, Scenario, SimFaultKind
from simulation.scenario_generator import generate_scenario

STEADY, FLOOD = "steady", "flood"
NUM_STEADY, NUM_FLOOD = 12, 100
STEADY_GAP_S, FLOOD_GAP_S = 0.25, 0.03

FAULTS: dict[str, tuple[FaultPlan, ...]] = {
    "nothing": (),
    "a decode worker dies": (FaultPlan(SimFaultKind.KILL, BEGIN_S + 0.5, 0.5, "decode-0"),),
    "a router dies": (FaultPlan(SimFaultKind.KILL, BEGIN_S + 0.5, 1.0, "router-1"),),
    "the store is emptied": (FaultPlan(SimFaultKind.WIPE, BEGIN_S + 0.5, 0.0, STORE),),
}


def scenario(*faults: FaultPlan) -> Scenario:
    """A tenant that asks now and then, beside one that sends several times what the workers compute."""
    steady = [
        ClientPlan(RequestId(f"s{n}"), BEGIN_S + STEADY_GAP_S * n, (n % 3, 1), 4, n, tenant=STEADY, returns=True)
        for n in range(NUM_STEADY)
    ]
    flood = [
        ClientPlan(RequestId(f"f{n}"), BEGIN_S + FLOOD_GAP_S * n, (n % 3, 2, 0), 8, n, tenant=FLOOD, returns=True)
        for n in range(NUM_FLOOD)
    ]
    quiet = replace(generate_scenario(0), num_routers=2, num_prefills=2, num_decodes=2, noise=Noise(), deadline_s=8.0)
    return replace(quiet, mean_step_s=0.05, clients=(*steady, *flood), faults=faults)


def outcomes(result: RunResult, prefix: str) -> Counter[str]:
    return Counter(one.split(" ", 1)[1] for one in result.outcomes if one.startswith(prefix))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_flood_costs_a_steady_tenant_no_answer(fault: str):
    result = run(scenario(*FAULTS[fault]))
    assert result.violation is None, describe(result)
    assert outcomes(result, "f")["refused overloaded"] > ADMISSION.max_running_requests, outcomes(result, "f")
    assert outcomes(result, "s") == {"finished ": NUM_STEADY}, outcomes(result, "s")


def test_a_full_queue_lets_a_request_of_another_tenant_in(monkeypatch: pytest.MonkeyPatch):
    """Seed 67: for it the newest request of the tenant that holds the most leaves. Both are here for a moment."""
    shed, left = AdmissionQueue.shed, list[Slot]()

    def spy(queue: AdmissionQueue, now: float) -> list[Slot]:
        removed = shed(queue, now)
        left.extend(removed)
        return removed

    monkeypatch.setattr(AdmissionQueue, "shed", spy)
    result = run(generate_scenario(67))
    assert result.violation is None, describe(result)
    assert left


def test_half_of_the_seeds_that_spare_routers_have_tenants():
    num_tenants = [len({plan.tenant for plan in generate_scenario(seed).clients}) for seed in range(100)]
    assert 20 < sum(num > 1 for num in num_tenants) < 50
