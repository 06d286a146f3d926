"""The simulation itself: many seeds without a violation, the same seed twice alike, and faults that really happened."""

import pytest

from simulation.report import describe
from simulation.scenario import scenario_of
from simulation.shrink import shrink
from simulation.world import run

NUM_SEEDS = 200
NUM_PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_seed_breaks_an_invariant(part: int):
    for seed in range(part, NUM_SEEDS, NUM_PARTS):
        verdict = run(scenario_of(seed))
        if verdict.violation is not None:
            pytest.fail(describe(shrink(verdict, run)))


@pytest.mark.parametrize("seed", [3, 7, 16, 35])
def test_a_seed_is_the_same_run_every_time(seed: int):
    first, second = run(scenario_of(seed)), run(scenario_of(seed))
    assert first.trace.entries == second.trace.entries
    assert first.trace.digest() == second.trace.digest()
    assert len(first.trace.entries) > 100


def test_nobody_fails_in_a_perfect_world():
    for seed in range(0, 50, 10):
        verdict = run(scenario_of(seed).without_faults())
        outcomes = {outcome.split(" ", 1)[1].strip() for outcome in verdict.outcomes}
        assert outcomes <= {"finished", "hung up"}, verdict.outcomes


def test_what_is_simulated_happens():
    """A run in which nothing ever went wrong would prove nothing."""
    texts = [entry.text for seed in range(1, 60) for entry in run(scenario_of(seed)).trace.entries]
    for what in ("kill", "freeze", "stick", "cut", "retry", "hangs up", "Preempted", "Unpinned", "log link_down"):
        assert any(text.startswith(what) for text in texts), what
    for what in ("keepalive", "code=worker_lost", "code=link_broken", "code=sent_back", "code=integrity_failure"):
        assert any(what in text for text in texts), what
