"""The same seeds with decode's tokens in sessions: no invariant breaks, and runs stay repeatable."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from simulation.report import describe
from simulation.run import RunResult, run
from simulation.scenario_generator import generate_scenario
from simulation.shrink import shrink

NUM_SEEDS = 40


def run_in_sessions(seed: int) -> RunResult:
    return run(replace(generate_scenario(seed), sessions=True))


@pytest.mark.slow
def test_no_seed_breaks_an_invariant_over_sessions():
    texts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        result = run_in_sessions(seed)
        if result.violation is not None:
            pytest.fail(describe(shrink(result, run)))
        for entry in result.trace.entries:
            for text in ("Session -x", "log session_opened", "log session_ended", " Generate "):
                texts[text] += text in entry.text
    assert texts["Session -x"] > NUM_SEEDS // 4, "connections break"
    assert texts["log session_ended"] > 10, "sessions are lost"
    assert texts[" Generate "] == 0, "no attempt has a call of its own"


@pytest.mark.parametrize("seed", [3, 7])
def test_a_seed_over_sessions_is_the_same_run_every_time(seed: int):
    assert run_in_sessions(seed).trace.digest() == run_in_sessions(seed).trace.digest()
