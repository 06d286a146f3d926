"""How prompts share the token budget of steps, in arrival order."""

from __future__ import annotations

import pytest

from baton.engine.fake_runner import SLOT_BYTES, FakeRunner
from baton.engine.handoff.kv_export import ExportTable
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.prefill.policy import PolicySettings, PrefillLimits, PrefillPolicy
from baton.services.prefill.scheduler import PrefillScheduler
from simulation.runtime.page_memory import SimMemory
from tests.tiny_workers import VOCAB_SIZE, engine_request

NUM_PAGES = 4096
PAGE_SIZE = 16


def rows_of_steps(
    prompts: list[int],
    token_budget: int,
    max_partial_prompts: int = 4,
    long_prompt_tokens: int = 0,
    policy: PrefillPolicy = PrefillPolicy.FCFS,
    urgent: int = -1,
) -> list[dict[int, int]]:
    """Tokens of each prompt, by number, in each step, until nothing can be scheduled. Prompts share no page.

    `urgent`: the number of the one prompt that has priority.
    """
    memory = SimMemory(NUM_PAGES, PAGE_SIZE * SLOT_BYTES)
    cache = PrefixCache(PagePool(NUM_PAGES), None)
    limits = PrefillLimits(
        PAGE_SIZE,
        token_budget,
        max_partial_prompts,
        NUM_PAGES,
        long_prompt_tokens,
        PolicySettings(policy, by_priority=True),
    )
    scheduler = PrefillScheduler(cache, ExportTable(cache.pool, 9.0, True), limits, PageChecks(cache))
    runner = FakeRunner(memory, PAGE_SIZE, VOCAB_SIZE)
    for number, num_tokens in enumerate(prompts):
        priority = int(number == urgent)
        scheduler.add(engine_request(f"r{number}", [0] * num_tokens, salt=str(number), priority=priority), 0, 9.0)
    steps = []
    while (batch := scheduler.schedule(0.0)) is not None:
        steps.append({int(row.id.request_id[1:]): len(row.tokens) for row in batch.rows})
        scheduler.commit(batch, runner.run(batch), 0.0)
    return steps


def packing(
    prompts: list[int], token_budget: int, max_partial_prompts: int = 4, long_prompt_tokens: int = 0
) -> list[list[int]]:
    """Tokens of each row of each step under fcfs."""
    steps = rows_of_steps(prompts, token_budget, max_partial_prompts, long_prompt_tokens)
    return [list(step.values()) for step in steps]


def end_steps(prompts: list[int], policy: PrefillPolicy) -> list[int]:
    """The step, from 1, with the last token of each prompt, at a budget of 2,048 and a threshold of 1,536."""
    steps = rows_of_steps(prompts, 2048, long_prompt_tokens=1536, policy=policy)
    assert [sum(step.get(number, 0) for step in steps) for number in range(len(prompts))] == prompts
    return [max(n for n, step in enumerate(steps, 1) if number in step) for number in range(len(prompts))]


def test_prompts_are_packed_in_arrival_order():
    steps = packing([4000, 1000, 500, 1200], 2000)
    assert steps == [[2000], [2000], [1000, 500, 496], [704]], "only a prompt's end may leave a page edge"


def test_short_prompts_fill_a_budget_whatever_the_bound():
    for max_partial_prompts in (1, 4):
        steps = packing([20] * 40, 512, max_partial_prompts)
        assert steps == [[20] * 25, [20] * 15]


def test_a_long_prompt_leaves_room_to_those_behind_it():
    """Without the threshold the first of the short ones ends in the step that ends the long one."""
    prompts = [6000, *[50] * 8]
    bounded, unbounded = packing(prompts, 2048, long_prompt_tokens=1536), packing(prompts, 2048)
    assert bounded[0] == [1648, *[50] * 8], "what the short ones leave goes to the long one, to a page edge"
    assert unbounded[:2] == [[2048], [2048]]
    assert sum(map(sum, bounded)) == sum(map(sum, unbounded)) == sum(prompts)
    assert len(bounded) == len(unbounded)


def test_a_long_prompt_alone_gets_the_whole_budget():
    assert packing([2048], 512, long_prompt_tokens=128) == [[512]] * 4


@pytest.mark.parametrize("policy", PrefillPolicy)
def test_long_prompts_end_one_after_another(policy: PrefillPolicy):
    """Side by side the first of two equal ones would end a step later, and the second one no sooner."""
    steps = rows_of_steps([1024, 1024], 512, long_prompt_tokens=128, policy=policy)
    assert steps == [{0: 512}, {0: 512}, {1: 512}, {1: 512}]


def test_a_long_prompt_does_not_take_what_one_before_it_leaves():
    """The second has a page less, so the first leaves a part of the step, which is for short ones."""
    steps = rows_of_steps([1024, 1008], 512, long_prompt_tokens=128)
    assert [max(n for n, step in enumerate(steps, 1) if number in step) for number in range(2)] == [3, 4]


def test_an_urgent_long_prompt_ends_before_an_older_shorter_one():
    """The oldest one has its share only."""
    steps = rows_of_steps([4080, 4096], 512, long_prompt_tokens=128, policy=PrefillPolicy.SRPT, urgent=1)
    assert [max(n for n, step in enumerate(steps, 1) if number in step) for number in range(2)] == [16, 11]


def test_a_long_prompt_leaves_nothing_to_a_longer_one():
    steps = rows_of_steps([1024, 2048, 1024], 512, long_prompt_tokens=128, policy=PrefillPolicy.SRPT)
    assert steps == [{0: 512}, {0: 512}, {1: 128, 2: 384}, {1: 128, 2: 384}, {1: 256, 2: 256}, *[{1: 512}] * 3]


def test_beyond_the_bound_only_prompts_that_end_in_the_step_begin():
    steps = packing([1024, 32, 1024, 32], 256, max_partial_prompts=1, long_prompt_tokens=128)
    assert steps[0] == [224, 32], "the second long one would be left half-done"
    assert steps == [[224, 32], *[[256]] * 3, [32, 192, 32], *[[256]] * 3, [64]]


TWO_LONG = [20_000, 20_000, *[50] * 8]


def test_two_long_prompts_hold_up_short_ones_by_arrival():
    ends = end_steps(TWO_LONG, PrefillPolicy.FCFS)
    assert (max(ends), ends[2]) == (20, 14)


@pytest.mark.parametrize("policy", [PrefillPolicy.SRPT, PrefillPolicy.EDF])
def test_short_prompts_pass_two_long_ones(policy: PrefillPolicy):
    first, second, *short = end_steps(TWO_LONG, policy)
    assert short == [1] * 8
    assert max(first, second) == 20, "no step is wasted"


def test_the_oldest_prompt_advances_whatever_passes_it():
    """Prompts of a whole step each come after a long one, which gets a quarter of every step."""
    steps = rows_of_steps([8192, *[2048] * 20], 2048, policy=PrefillPolicy.SRPT)
    assert [step[0] for step in steps[:10]] == [512] * 10, "then it is the shortest"
    assert not any(0 in step for step in steps[16:])


def test_half_done_and_waiting_prompts_rank_together():
    steps = rows_of_steps([1024, 640], 256, long_prompt_tokens=128, policy=PrefillPolicy.SRPT)
    assert steps[:4] == [*[{1: 192, 0: 64}] * 3, {1: 64, 0: 192}]
    assert sum(sum(step.values()) for step in steps) == 1664


def test_packing_by_remaining_tokens():
    steps = rows_of_steps([4000, 1000, 500, 1200], 2000, policy=PrefillPolicy.SRPT)
    assert steps[0] == {2: 500, 1: 976, 0: 512}
