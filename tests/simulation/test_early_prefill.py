"""Prompts that start before their reservation, in simulated clusters: every end is drawn, and a wrong rule is found."""

from dataclasses import replace
from typing import Any

import pytest

from baton.domain.ids import RequestId
from baton.services.router.dispatch.dispatcher import TokenDispatcher
from baton.services.router.dispatch.placement.query import PlacementQuery
from baton.services.router.dispatch.reserve import Reserver, _Search
from baton.telemetry.metrics import EARLY_PREFILLS_TOTAL
from simulation.policies import CONFIG, PolicyClasses
from simulation.report import describe
from simulation.run import RunResult, run
from simulation.scenario import BEGIN_S, ClientPlan, FaultPlan, Noise, Scenario, SimFaultKind
from simulation.scenario_generator import generate_scenario

OUTCOMES = ("reserved", "no_room", "ended")
SEEDS = (2, 4, 8, 36)
"""Refused reservations, lost workers and cancelled requests beside a prompt that has started."""


class _FreeSearch(_Search):
    __slots__ = ()

    def query_at(self, now: float) -> PlacementQuery:
        return replace(super().query_at(now), prefill=None)


class _ForgetsWhereItBegan(Reserver):
    def _start_if_room(self, search: Any, pair: Any, keys: Any) -> None:
        super()._start_if_room(search, pair, keys)
        search.__class__ = _FreeSearch


class ForgetsWhereItBegan(TokenDispatcher):
    """Names any prefill worker to decode, though another one has begun the prompt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reserver = _ForgetsWhereItBegan(self._workers, self._aborts, self._limits.reserve, self._prefill)


def num_early(outcome: str) -> float:
    return EARLY_PREFILLS_TOTAL.labels(outcome).value


def test_early_prompts_get_room_find_none_and_end_otherwise():
    before = {outcome: num_early(outcome) for outcome in OUTCOMES}
    assert [run(generate_scenario(seed)).violation for seed in SEEDS] == [None] * len(SEEDS)
    grown = {outcome: num_early(outcome) - before[outcome] for outcome in OUTCOMES}
    assert all(grown.values()), grown


def test_an_attempt_of_two_prefill_workers_is_found():
    policies = PolicyClasses(dispatcher=ForgetsWhereItBegan)
    violation = next(filter(None, (run(generate_scenario(seed), policies).violation for seed in range(20, 60))), None)
    assert violation is not None
    assert violation.rule == "I8"


LATE_S = CONFIG.lease_s + 0.2
"""How late decode watches: its export's lease is over, and no other bound is."""

LATE = {
    "decode hangs": FaultPlan(SimFaultKind.HANG, BEGIN_S - 0.05, LATE_S + 0.05, "decode-0"),
    "reservation late": FaultPlan(SimFaultKind.CUT, BEGIN_S - 0.001, LATE_S, "router-0", "decode-0"),
    "watch late": FaultPlan(SimFaultKind.CUT, BEGIN_S - 0.001, LATE_S, "decode-0", "prefill-0"),
}


def late_scenario(fault: FaultPlan) -> Scenario:
    """One prompt, whose export ends before decode can watch it."""
    client = ClientPlan(RequestId("r0"), BEGIN_S, (0, 1, 2, 0, 1), 8, 1)
    quiet = replace(generate_scenario(0), num_routers=1, num_prefills=1, num_decodes=1, noise=Noise(), deadline_s=20.0)
    return replace(quiet, mean_step_s=0.01, num_local_prefill=0, clients=(client,), faults=(fault,))


def end_of(result: RunResult, name: str) -> float:
    """When the client's answer ended."""
    return next(e.at_s for e in result.trace.entries if e.request_id == name and e.text.startswith("finished"))


@pytest.mark.parametrize("name", LATE)
def test_a_watch_of_an_ended_export_is_answered_and_not_silent(name: str):
    result = run(late_scenario(LATE[name]))
    texts = [entry.text for entry in result.trace.entries]
    assert result.violation is None, describe(result)
    assert result.outcomes[0] == "r0 finished ", describe(result)
    assert any(text.startswith("log attempt_failed") and "lease_ended" in text for text in texts), describe(result)
    assert end_of(result, "r0") < BEGIN_S + LATE_S + 1.0, describe(result)
