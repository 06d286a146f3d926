"""Proof that the simulation can fail: each bug here is planted in every worker, and a few seeds must find it."""

import pytest

from simulation.parts import Parts
from simulation.report import describe
from simulation.scenario import Scenario, scenario_of
from simulation.shrink import shrink
from simulation.world import Verdict, run
from tests.simulation import planted

MAX_SEEDS = 100


@pytest.mark.parametrize(
    ("parts", "rules"),
    [
        pytest.param(Parts(offer_book=planted.UnpinsBeforeTheCommit), {"crash", "I2"}, id="late unpin"),
        pytest.param(Parts(offer_book=planted.NeverUnpins), {"I5", "I8"}, id="never unpin"),
        pytest.param(Parts(offer_book=planted.TakesOlderAttempts), {"I3", "I4"}, id="missing fence"),
        pytest.param(Parts(landing_book=planted.CommitsBeforeTheReadsAreOver), {"crash", "I1", "I2"}, id="no drain"),
        pytest.param(Parts(landing_book=planted.CommitsBeforeAllIsAnnounced), {"crash", "I2"}, id="pages missing"),
        pytest.param(Parts(landing_book=planted.FreesBeforeTheReadsAreOver), {"crash", "I1"}, id="freed under a read"),
        pytest.param(Parts(landing_book=planted.PromisesTheSamePagesTwice), {"crash", "I6", "I8"}, id="promised twice"),
        pytest.param(Parts(decode_scheduler=planted.EmitsTwice), {"I4"}, id="double emit"),
    ],
)
def test_a_planted_bug_is_found(parts: Parts, rules: set[str]):
    violations = (run(scenario_of(seed), parts).violation for seed in range(1, MAX_SEEDS))
    found = next((violation for violation in violations if violation is not None), None)
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    assert found.rule in rules, str(found)


def test_a_failure_is_made_small_and_shown():
    parts = Parts(landing_book=planted.CommitsBeforeTheReadsAreOver)

    def run_planted(scenario: Scenario) -> Verdict:
        return run(scenario, parts)

    failing = next(v for v in (run_planted(scenario_of(seed)) for seed in range(1, MAX_SEEDS)) if v.violation)
    smallest = shrink(failing, run_planted)
    assert len(smallest.scenario.clients) + len(smallest.scenario.faults) < (
        len(failing.scenario.clients) + len(failing.scenario.faults)
    )
    assert failing.violation is not None
    assert smallest.violation is not None
    assert smallest.violation.rule == failing.violation.rule
    assert "VIOLATION" in describe(smallest)
