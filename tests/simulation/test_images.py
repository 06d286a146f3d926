"""Images and encode workers in simulation: their faults happen, and bugs in their parts are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from baton.worker.media import embedding_puller
from simulation.checks.invariants import Violation
from simulation.policies import PolicyClasses
from simulation.run import RunResult, run
from simulation.scenario import BEGIN_S, END_S, FaultPlan, Scenario, SimFaultKind
from simulation.scenario_generator import generate_scenario
from tests.simulation import planted_bugs

MAX_SEEDS = 150


def image_scenarios() -> Iterator[Scenario]:
    return (scenario for seed in range(MAX_SEEDS) if (scenario := generate_scenario(seed)).images)


def rots_where_it_is_used(scenario: Scenario) -> bool:
    """True if embeddings may rot in a prefill worker, behind the comparison of what it has pulled."""
    return any(fault.kind is SimFaultKind.ROT and fault.target in scenario.prefills for fault in scenario.faults)


def find_result(policies: PolicyClasses, *, rots: bool = True) -> RunResult | None:
    """The first violation; without `rots`, of those scenarios in which nothing rots where it is used."""
    scenarios = (one for one in image_scenarios() if rots or not rots_where_it_is_used(one))
    results = (run(scenario, policies) for scenario in scenarios)
    return next((one for one in results if one.violation is not None), None)


def find_violation(policies: PolicyClasses) -> Violation | None:
    found = find_result(policies)
    return None if found is None else found.violation


@pytest.mark.parametrize(
    ("policies", "rules"),
    [
        pytest.param(PolicyClasses(encode_scheduler=planted_bugs.NeverEndsLeases), {"I5"}, id="leases never end"),
        pytest.param(PolicyClasses(encode_scheduler=planted_bugs.GivesAnotherImage), {"crash", "I2"}, id="other image"),
        pytest.param(PolicyClasses(media_gate=planted_bugs.ComputesWithoutImages), {"I8"}, id="no wait for images"),
        pytest.param(PolicyClasses(media_gate=planted_bugs.ComputesOnAnything), {"crash"}, id="no wait, no check"),
        pytest.param(PolicyClasses(media_receiver=planted_bugs.KeepsRoomOfUploads), {"I5", "I8"}, id="room kept"),
    ],
)
def test_a_planted_bug_is_found(policies: PolicyClasses, rules: set[str]):
    found = find_violation(policies)
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    assert found.rule in rules, str(found)


def test_a_puller_that_ignores_digests_is_found(monkeypatch: pytest.MonkeyPatch):
    """By wrong tokens, unless steps compare what they use; and either comparison alone is enough for that seed."""
    unchecked = PolicyClasses(media_gate=planted_bugs.ComparesNoEmbeddings)
    with monkeypatch.context() as patch:
        patch.setattr(embedding_puller, "_checked", planted_bugs.takes_any_part)
        found = find_result(unchecked, rots=False)
        assert found is not None
        assert found.violation is not None
        assert found.violation.rule in ("crash", "I2"), str(found.violation)
        assert run(found.scenario).violation is None
    assert run(found.scenario, unchecked).violation is None


def with_rotting_prefills(scenario: Scenario) -> Scenario:
    """Bytes of pages and embeddings of all prefill workers flip, each a few times."""
    rng = Random(f"embeddings rot {scenario.seed}")
    rot = [
        FaultPlan(SimFaultKind.ROT, rng.uniform(BEGIN_S, END_S), 2.0, worker)
        for worker in scenario.prefills
        for _ in range(6)
    ]
    return replace(scenario, faults=(*scenario.faults, *rot))


def test_embeddings_that_rot_in_prefill_workers_are_compared():
    """One seed shows what happens without the comparison; the same scenarios are good with it."""
    scenarios = [with_rotting_prefills(one) for one in islice((one for one in image_scenarios() if one.digests), 3)]
    found = [run(one, PolicyClasses(media_gate=planted_bugs.ComparesNoEmbeddings)).violation for one in scenarios]
    assert {one.rule for one in found if one is not None} <= {"crash", "I2"}
    assert any(found)
    assert [run(one).violation for one in scenarios] == [None] * len(scenarios)
