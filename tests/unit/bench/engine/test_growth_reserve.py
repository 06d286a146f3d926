"""The model of a decode worker under growth reserves: requests of a trace in order, each with its own lengths."""

from __future__ import annotations

from random import Random

import pytest

from baton.kv.growth import GrowthPolicy
from baton.services.cli.bench.workload.traces import TraceRow
from bench.engine.growth_reserve import MAX_TOKENS, PAGE_SIZE, simulate, trace_load

NUM_PAGES = (MAX_TOKENS + 1000) // PAGE_SIZE + 1
"""Room for the longest output that a client may ask for."""


def test_an_output_has_the_tokens_that_the_trace_says():
    """`full` lets one row run at a time here, so each takes as many steps as it has tokens; prefill made the first."""
    load = trace_load("two", [TraceRow(0.0, 100, 31), TraceRow(1.0, 120, 11)], NUM_PAGES)
    one = simulate(GrowthPolicy.FULL, load, num_steps=10 * (30 + 10))
    assert (one.num_finished, one.num_tokens, one.num_preemptions, one.num_failed) == (20, 400, 0, 0)
    assert max(one.gaps) == 1


def test_requests_come_in_order_and_again_after_the_last():
    """A request that finds no room has the same number, and so the same lengths, when it asks again."""
    load = trace_load("two", [TraceRow(0.0, 100, 31), TraceRow(1.0, 120, 11)], NUM_PAGES)
    assert [load.draw(Random(0), number) for number in (0, 0, 1, 2)] == [(100, 31), (100, 31), (120, 11), (100, 31)]


@pytest.mark.parametrize("mode", GrowthPolicy)
def test_requests_end_as_often_as_each_other(mode: GrowthPolicy):
    """A large one is not passed by small ones: half of the tokens and a little more are those of long outputs."""
    rows = [TraceRow(0.0, 40, 10), TraceRow(1.0, 1000, 30)]
    seen = simulate(mode, trace_load("uneven", rows, NUM_PAGES), num_steps=150)
    assert seen.num_failed == 0
    mean = seen.num_tokens / seen.num_finished
    assert 19 <= mean <= 26, "prefill made the first of 20 on average; rows that run on at the end add theirs"
