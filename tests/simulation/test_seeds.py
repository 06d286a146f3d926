"""The simulation itself: many seeds without a violation, the same seed twice alike, and faults that really happened."""

from collections import Counter
from functools import cache

import pytest

from simulation.draw import scenario_of
from simulation.report import describe
from simulation.shrink import shrink
from simulation.sweep import Swept, sweep
from simulation.world import Verdict, run

NUM_SEEDS = 200
NUM_PARTS = 4

BEGINNINGS = (
    *("kill", "freeze", "stick", "drain", "cut", "mute", "slow", "kill book", "freeze book", "kill router"),
    *("retry", "hangs up", "loses its connection", "comes back", "has left", "Preempted", "Unpinned"),
    *("log link_down", "log link_rests", "log call_claimed", "log call_carried_on"),
)
PARTS_OF_LINES = (
    *("keepalive", "code=worker_lost", "code=link_broken", "code=sent_back", "code=integrity_failure"),
    *("refused overloaded", "refused no_workers"),
)


@cache
def verdict_of(seed: int) -> Verdict:
    """Each seed runs once for all tests here."""
    return run(scenario_of(seed))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_seed_breaks_an_invariant(part: int):
    for seed in range(part, NUM_SEEDS, NUM_PARTS):
        verdict = verdict_of(seed)
        if verdict.violation is not None:
            pytest.fail(describe(shrink(verdict, run)))


@pytest.mark.parametrize("seed", [3, 7, 16, 35])
def test_a_seed_is_the_same_run_every_time(seed: int):
    first, second = verdict_of(seed), run(scenario_of(seed))
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
    texts = [entry.text for seed in range(1, 60) for entry in verdict_of(seed).trace.entries]
    for begins in BEGINNINGS:
        assert any(text.startswith(begins) for text in texts), begins
    for holds in PARTS_OF_LINES:
        assert any(holds in text for text in texts), holds


def test_answers_meet_a_change_of_model():
    """In mid-run every worker is upgraded: some answers lose the last worker that could have ended them."""
    verdicts = [verdict_of(seed) for seed in range(6, 150, 10)]
    assert [verdict.violation for verdict in verdicts] == [None] * len(verdicts)
    outcomes = Counter(outcome.split(" ", 1)[1].strip() for verdict in verdicts for outcome in verdict.outcomes)
    assert outcomes["finished"] > outcomes["failed model_replaced"] > 0


def test_nobody_fails_because_processes_leave():
    """Workers and routers drain in mid-run and come back: nobody is sent away who need not be, and nobody fails."""
    verdicts = [verdict_of(seed) for seed in range(5, NUM_SEEDS, 10)]
    assert [verdict.violation for verdict in verdicts] == [None] * len(verdicts)
    assert all(verdict.scenario.is_gentle and verdict.scenario.faults for verdict in verdicts)
    left = [entry.place for verdict in verdicts for entry in verdict.trace.entries if entry.text == "has left"]
    assert {place.partition("-")[0] for place in left} == {"router", "prefill", "decode"}


def test_a_burst_is_taken_in_part_and_ends():
    """More come at once than the door lets in: some are sent away, all others are answered."""
    verdict = run(scenario_of(7).without_faults())
    outcomes = Counter(outcome.split(" ", 1)[1].strip() for outcome in verdict.outcomes)
    assert verdict.violation is None
    assert outcomes["refused overloaded"] > 0
    assert set(outcomes) <= {"finished", "hung up", "refused overloaded", "failed deadline_exceeded"}


def test_many_seeds_in_two_processes_are_the_same_seeds():
    good: list[int] = []
    assert sweep(first=3, num_seeds=14, num_jobs=2, progress=good.append) == Swept(14, 17, None)
    assert good[-1] == 14
