"""The replay of traces through the prefill scheduler: every prompt is served once, in simulated time."""

from __future__ import annotations

from baton.services.cli.bench.workload.traces import TraceRow
from bench.engine.prefill_policies import PAGE_SIZE, TOKEN_BUDGET, VARIANTS, replay

BUDGET_BLOCKS = TOKEN_BUDGET // PAGE_SIZE


def prompt(arrival_s: float, first_block: int, num_blocks: int) -> TraceRow:
    return TraceRow(arrival_s, PAGE_SIZE * num_blocks, 1, tuple(range(first_block, first_block + num_blocks)))


def test_every_variant_serves_every_prompt():
    """A long prompt with a short one behind it, and its repetition when it is cached."""
    size = 8 * BUDGET_BLOCKS
    rows = [prompt(0.0, 0, size), prompt(0.1, 1000, 1), prompt(900.0, 0, size)]
    for variant in VARIANTS:
        outcome = replay(rows, variant, token_s=0.001)
        assert (len(outcome.short_s), len(outcome.long_s), len(outcome.all_s)) == (1, 2, 3)
        assert outcome.num_tokens == PAGE_SIZE * (size + 1 + 1), "all, and the last page of the repetition"
        assert min(outcome.long_s) < 0.1 < max(outcome.long_s)


def test_the_policy_decides_when_a_short_prompt_is_served():
    rows = [prompt(0.0, 0, 8 * BUDGET_BLOCKS), prompt(0.0, 500, 8 * BUDGET_BLOCKS), prompt(0.1, 1000, 1)]
    waits = {variant.name: replay(rows, variant, token_s=0.001).short_s[0] for variant in VARIANTS}
    assert waits["srpt"] < 2.0 < waits["fcfs"]
