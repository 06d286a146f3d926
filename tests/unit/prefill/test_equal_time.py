"""Steps of equal time: chunks shrink as the context grows, by what a step-time model has learned from the steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import AttemptId
from baton.domain.timing.step_time import EMPTY_STEP, MIN_STEPS, StepShape, StepTimeModel
from baton.engine.batch import StepOutput
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.step_metrics import shape_of
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.prefill.policy import PolicySettings, PrefillLimits, PrefillPolicy
from baton.services.prefill.scheduler import PrefillScheduler
from simulation.runtime.step_time import ScriptedStepTime
from tests.tiny_workers import (
    NUM_PAGES,
    PAGE_SIZE,
    REPEATABLE_SETTINGS,
    SCRIPTED_SAMPLE,
    assert_idle,
    engine_request,
    tiny_prefill,
)

BUDGET, PAGE = 512, 16
CONTEXT = 12_000


def seconds(shape: StepShape) -> float:
    """A machine on which attention to 3,000 tokens costs as much as all else of a token."""
    return 0.005 + 1e-3 * shape.num_tokens + 1e-3 / 3000 * shape.chunk_pairs


FIRST_S = seconds(EMPTY_STEP.with_chunk(BUDGET, 0))


@dataclass
class Steps:
    """Shapes and seconds of steps in order, and the step in which each prompt ended."""

    shapes: list[StepShape] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ends: dict[AttemptId, int] = field(default_factory=dict)


def run(
    prompts: list[int],
    model: StepTimeModel | None,
    policy: PrefillPolicy = PrefillPolicy.FCFS,
    num_first: int | None = None,
) -> Steps:
    """Computes prompts; those after the first `num_first` come after 50 steps. The model learns from every step."""
    cache = PrefixCache(PagePool(4096), None)
    limits = PrefillLimits(PAGE, BUDGET, 4, 4096, 384, PolicySettings(policy), equal_time=model)
    exports = ExportTable(cache.pool, 9.0, grants_leases=True)
    scheduler = PrefillScheduler(cache, exports, limits, PageChecks(cache))
    requests = [engine_request(f"r{number}", [0] * num, salt=str(number)) for number, num in enumerate(prompts)]
    first = requests[:num_first]
    for request in first:
        scheduler.add(request, 0, 9.0)
    steps, learned = Steps(), StepTimeModel() if model is None else model
    while (batch := scheduler.schedule(0.0)) is not None:
        steps.shapes.append(shape_of(batch))
        steps.seconds.append(seconds(shape_of(batch)))
        learned.observe(steps.shapes[-1], steps.seconds[-1])
        output = StepOutput(tuple(() if row.sample is None else (SCRIPTED_SAMPLE,) for row in batch.rows))
        for effect in scheduler.commit(batch, output, 0.0):
            if isinstance(effect, Seal):
                steps.ends[effect.id] = len(steps.seconds)
        for request in requests[len(first) :] if len(steps.seconds) == 50 else ():
            scheduler.add(request, 0, 9.0)
    assert sum(shape.num_tokens for shape in steps.shapes) == sum(prompts)
    assert len(steps.ends) == len(prompts)
    return steps


def test_steps_of_a_long_prompt_take_equal_time():
    fixed, equal = run([CONTEXT], None), run([CONTEXT], StepTimeModel())
    assert fixed.seconds[-2] > 4 * FIRST_S, "fixed chunks take ever longer"
    settled = equal.seconds[MIN_STEPS:-2]
    assert all(0.87 * FIRST_S <= one_s <= 1.01 * FIRST_S for one_s in settled), "a page is up to 13 % of a chunk"
    sizes = [shape.num_tokens for shape in equal.shapes[MIN_STEPS:-2]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) > 50
    assert sizes[0] == 2 * sizes[-1]


def test_until_the_prediction_is_reliable_chunks_are_fixed():
    equal = run([CONTEXT], StepTimeModel())
    assert [shape.num_tokens for shape in equal.shapes[:MIN_STEPS]] == [BUDGET] * MIN_STEPS


@pytest.mark.parametrize("policy", PrefillPolicy)
def test_mixed_steps_take_no_longer_whoever_is_first(policy: PrefillPolicy):
    """Chunks of several prompts with long and short contexts are bounded together."""
    steps = run([12_000, 6_000, *[50] * 30, 3_000, *[300] * 10], ScriptedStepTime(seconds), policy)
    assert max(steps.seconds) <= FIRST_S
    assert sum(one_s >= 0.85 * FIRST_S for one_s in steps.seconds) > 0.9 * len(steps.seconds)


def test_short_prompts_are_packed_as_ever():
    prompts = [20] * 40
    assert run(prompts, ScriptedStepTime(seconds)).shapes == run(prompts, None).shapes


def test_the_oldest_prompt_leaves_time_to_short_ones():
    """Its share is one of the time: its chunk alone, of as many tokens, would take that of a whole step by now."""
    steps = run([CONTEXT, *[50] * 6], ScriptedStepTime(seconds), PrefillPolicy.SRPT, num_first=1)
    assert seconds(EMPTY_STEP.with_chunk(BUDGET // 4, steps.shapes[0].num_tokens * 15)) > 0.8 * FIRST_S
    assert [end for id, end in steps.ends.items() if id.request_id != "r0"] == [51] * 6
    assert max(steps.seconds) <= FIRST_S


COSTS = st.tuples(st.floats(0.0, 4.0), st.floats(0.01, 4.0), st.floats(0.0, 4.0))
PROMPTS = st.lists(st.integers(1, 4 * PAGE_SIZE), min_size=1, max_size=9)


@pytest.mark.parametrize("policy", PrefillPolicy)
@given(costs=COSTS, prompts=PROMPTS, share=st.sampled_from([0.0, 0.25, 1.0]), threshold=st.sampled_from([0, PAGE_SIZE]))
@REPEATABLE_SETTINGS
def test_whatever_steps_cost_every_step_advances_the_oldest(
    policy: PrefillPolicy, costs: tuple[float, float, float], prompts: list[int], share: float, threshold: int
):
    """And takes no longer than the budget at the beginning of a prompt, unless a page does. No page is missing."""

    def cost(shape: StepShape) -> float:
        return costs[0] + costs[1] * shape.num_tokens + costs[2] * shape.chunk_pairs

    budget = 3 * PAGE_SIZE
    world = tiny_prefill(
        9.0, budget, NUM_PAGES, max_partial_prompts=1, long_prompt_tokens=threshold,
        order=PolicySettings(policy, share), equal_time=ScriptedStepTime(cost),
    )  # fmt: skip
    for number, num_tokens in enumerate(prompts):
        world.scheduler.add(engine_request(f"{number}", [0] * num_tokens, salt=str(number)), 0, 999.0)
    unfinished, num_steps = dict(enumerate(prompts)), 0
    while unfinished:
        batch = world.scheduler.schedule(0.0)
        assert batch is not None
        shape, longest_s = shape_of(batch), cost(EMPTY_STEP.with_chunk(budget, 0))
        assert shape.num_tokens <= budget
        assert cost(shape) <= longest_s or (len(batch.rows) == 1 and shape.num_tokens <= PAGE_SIZE)
        assert int(min(batch.rows, key=lambda row: int(row.id.request_id)).id.request_id) == min(unfinished)
        num_steps += 1
        for effect in world.scheduler.commit(batch, world.runner.run(batch), 0.0):
            if isinstance(effect, Seal):
                del unfinished[int(effect.id.request_id)]
                assert world.exports.commit(effect.id)
    assert num_steps <= sum(-(-num_tokens // PAGE_SIZE) for num_tokens in prompts)
    assert_idle(world.cache)
