"""The replay of traces through the prefill scheduler: every prompt is served once, in simulated time."""

from __future__ import annotations

from baton.services.cli.bench.workload.traces import TraceRow
from bench.engine.prefill_policies import HEEDED, OVERTAKING, PAGE_SIZE, TOKEN_BUDGET, VARIANTS, priority_table, replay

BUDGET_BLOCKS = TOKEN_BUDGET // PAGE_SIZE


def prompt(arrival_s: float, first_block: int, num_blocks: int) -> TraceRow:
    return TraceRow(arrival_s, PAGE_SIZE * num_blocks, 1, tuple(range(first_block, first_block + num_blocks)))


def test_every_variant_serves_every_prompt():
    """A long prompt with a short one behind it, and its repetition when it is cached."""
    size = 8 * BUDGET_BLOCKS
    rows = [prompt(0.0, 0, size), prompt(0.1, 1000, 1), prompt(900.0, 0, size)]
    for variant in (*VARIANTS, *OVERTAKING):
        outcome = replay(rows, variant, token_s=0.001)
        assert (len(outcome.short_s), len(outcome.long_s), len(outcome.all_s)) == (1, 2, 3)
        assert outcome.num_tokens == PAGE_SIZE * (size + 1 + 1), "all, and the last page of the repetition"
        assert min(outcome.long_s) < 0.1 < max(outcome.long_s)


def test_the_policy_decides_when_a_short_prompt_is_served():
    rows = [prompt(0.0, 0, 8 * BUDGET_BLOCKS), prompt(0.0, 500, 8 * BUDGET_BLOCKS), prompt(0.1, 1000, 1)]
    waits = {variant.name: replay(rows, variant, token_s=0.001).short_s[0] for variant in VARIANTS}
    assert waits["srpt"] < 2.0 < waits["fcfs"]


def test_urgent_prompts_come_first_where_priorities_are_heeded():
    """The youngest of three long prompts is urgent."""
    rows = [
        prompt(0.0, 0, 8 * BUDGET_BLOCKS),
        prompt(0.1, 500, 8 * BUDGET_BLOCKS),
        prompt(0.1, 1000, 8 * BUDGET_BLOCKS),
    ]
    found = {variant.name: replay(rows, variant, token_s=0.001, urgent={2}) for variant in HEEDED}
    for policy in ("fcfs", "srpt"):
        plain, heeded = found[policy], found[f"{policy}, by priority"]
        assert heeded.urgent_s[0] < min(heeded.other_s) < plain.urgent_s[0]
        assert len(heeded.urgent_s) == 1
        assert len(heeded.other_s) == 2


def test_the_table_of_priorities_has_a_row_for_each_variant():
    rows = [prompt(float(number), 100 * number, 1 + number % 3) for number in range(40)]
    lines = priority_table("a trace", rows, 0.8)
    assert len(lines) == 4 + len(HEEDED)
    assert "of which" in lines[0]
