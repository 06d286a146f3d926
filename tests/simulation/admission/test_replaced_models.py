"""All workers get another model while answers run: newcomers are served, whatever waits for the old one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from baton.domain.ids import RequestId
from baton.services.router.dispatch.dispatcher import TokenDispatcher
from simulation.nodes.router import ADMISSION
from simulation.policies import CONFIG, PolicyClasses
from simulation.report import describe
from simulation.run import RunResult, run
from simulation.scenario import BEGIN_S, ClientPlan, FaultPlan, Noise, Scenario, SimFaultKind
from simulation.scenario_generator import generate_scenario

STEP_S = 0.7
"""A prompt and six tokens outlast a drain: every answer is interrupted."""

DEADLINE_S = 40.0
"""Long enough for newcomers to be answered before those that wait for the old model end."""

NUM_DRAWS = 20

ROUTER_DIES = FaultPlan(SimFaultKind.KILL, BEGIN_S + 3.0, 1.0, "router-0")


class KeepsSlotsOfReplacedModels(TokenDispatcher):
    """A request whose model is gone waits for it in its slot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cast(Any, self.admission_queue).suspend = lambda slot, now: []


def scenario(seed: int, num_routers: int, *faults: FaultPlan) -> Scenario:
    """As many clients as may run, and more than there are rows."""
    clients = [
        ClientPlan(RequestId(f"r{n}"), BEGIN_S + 0.01 * n, (n % 3,), 6, n, f"router-{n % num_routers}", returns=True)
        for n in range(ADMISSION.max_running_requests)
    ]
    upgrades = [FaultPlan(SimFaultKind.UPGRADE, BEGIN_S + 0.6, 0.5, name) for name in ("prefill-0", "decode-0")]
    quiet = replace(generate_scenario(0), num_prefills=1, num_decodes=1, noise=Noise(), deadline_s=DEADLINE_S)
    faults = (*upgrades, *faults)
    drawn = replace(quiet, seed=seed, num_routers=num_routers, mean_step_s=STEP_S)
    return replace(drawn, clients=tuple(clients), faults=faults)


def ended_at(result: RunResult, clients: str, how: str) -> list[float]:
    """The times at which clients had this end."""
    entries = (entry for entry in result.trace.entries if entry.source == "client" and entry.text.startswith(how))
    return sorted(entry.at_s for entry in entries if (entry.request_id or "").startswith(clients))


def newcomers_before_the_old_end(num_routers: int, faults: tuple[FaultPlan, ...], policies: PolicyClasses) -> int:
    """Newcomers that were answered while others waited for the old model.

    In the first draw of the steps' times in which the upgrade finds answers in all rows.
    """
    for seed in range(NUM_DRAWS):
        result = run(scenario(seed, num_routers, *faults), policies)
        assert result.violation is None, describe(result)
        old = ended_at(result, "r", "failed model_replaced")
        if len(old) >= CONFIG.max_rows:
            return sum(at_s < old[0] for at_s in ended_at(result, "probe", "finished"))
    raise AssertionError("no draw interrupts as many answers as there are rows")


@pytest.mark.parametrize(("num_routers", "faults"), [(1, ()), (2, ()), (1, (ROUTER_DIES,))])
def test_requests_of_a_replaced_model_hold_up_no_newcomer(num_routers: int, faults: tuple[FaultPlan, ...]):
    """The last as seed 9004336: the router takes its calls over when it is back."""
    assert newcomers_before_the_old_end(num_routers, faults, PolicyClasses()) == 3


def test_a_router_that_keeps_their_slots_is_found():
    assert newcomers_before_the_old_end(1, (), PolicyClasses(dispatcher=KeepsSlotsOfReplacedModels)) == 0
