"""Images and encode workers in simulation: their faults happen, and bugs in their parts are found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.worker.media import embedding_puller
from simulation.checks.invariants import Violation
from simulation.policies import PolicyClasses
from simulation.run import run
from simulation.scenario import Scenario
from simulation.scenario_generator import generate_scenario
from tests.simulation import planted_bugs

MAX_SEEDS = 150


def image_scenarios() -> Iterator[Scenario]:
    return (scenario for seed in range(MAX_SEEDS) if (scenario := generate_scenario(seed)).images)


def find_violation(policies: PolicyClasses) -> Violation | None:
    violations = (run(scenario, policies).violation for scenario in image_scenarios())
    return next((one for one in violations if one is not None), None)


@pytest.mark.parametrize(
    ("policies", "rules"),
    [
        pytest.param(PolicyClasses(encode_scheduler=planted_bugs.NeverEndsLeases), {"I5"}, id="leases never end"),
        pytest.param(PolicyClasses(encode_scheduler=planted_bugs.GivesAnotherImage), {"crash", "I2"}, id="other image"),
        pytest.param(PolicyClasses(media_gate=planted_bugs.ComputesWithoutImages), {"crash"}, id="no wait for images"),
        pytest.param(PolicyClasses(media_receiver=planted_bugs.KeepsRoomOfUploads), {"I5", "I8"}, id="room kept"),
    ],
)
def test_a_planted_bug_is_found(policies: PolicyClasses, rules: set[str]):
    found = find_violation(policies)
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    assert found.rule in rules, str(found)


def test_a_puller_that_ignores_digests_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedding_puller, "_checked", planted_bugs.takes_any_part)
    found = find_violation(PolicyClasses())
    assert found is not None
    assert found.rule in ("crash", "I2"), str(found)
