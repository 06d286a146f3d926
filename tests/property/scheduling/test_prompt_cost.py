"""Where a prompt is computed, by step times that workers have learned, whatever these and the loads are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation, PageKey, WorkerId
from baton.domain.timing.prompt_cost import (
    LOCAL_TOKENS_PER_COMPUTED,
    MOVED_TOKENS_PER_COMPUTED,
    CostBasis,
    PromptLoad,
    basis_of,
    handover_cost,
    local_cost,
    token_seconds,
)
from baton.domain.timing.step_time import EMPTY_STEP, UNITS, StepShape, StepTimeFit, StepTimeModel
from baton.domain.worker import LinkRecord, PageCounts, WorkerBudgets, WorkerLoad, WorkerRecord, WorkerRole
from baton.services.router.dispatch.placement.choice import choose_pair
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.placement.prefix_index import PrefixIndex
from baton.services.router.dispatch.placement.query import PlacementQuery

PAGE, ROWS, BUDGET, PAGE_BYTES = 16, 8, 256, 1 << 16

fits = st.tuples(*[st.floats(1e-4, 0.1)] * len(UNITS)).map(lambda weights: StepTimeFit(weights, 1e-4))
loads = st.builds(
    WorkerLoad,
    waiting_tokens=st.integers(0, 4000),
    running_rows=st.integers(0, ROWS - 1),
    available_pages=st.just(4000),
    total_pages=st.just(4000),
    pages=st.builds(PageCounts, live=st.integers(0, 400)),
)
works = st.integers(1, 4000).flatmap(
    lambda num: st.builds(PromptLoad, st.just(num), st.integers(0, num - 1), st.integers(0, num - 1))
)


def worker(role: WorkerRole, load: WorkerLoad, fit: StepTimeFit | None, prefill_tokens: int) -> WorkerRecord:
    number = 1 if role is WorkerRole.PREFILL else 101
    return WorkerRecord(
        WorkerId(role.value), role, Incarnation(number), "", "m", "f", PAGE, 10_000, 10,
        budgets=WorkerBudgets(prefill_tokens, ROWS if role is WorkerRole.DECODE else 0),
        load=replace(load, step_time=fit), page_bytes=PAGE_BYTES,
    )  # fmt: skip


def linked(decode: WorkerRecord, prefill: WorkerRecord, bandwidth: float) -> WorkerRecord:
    link = LinkRecord(prefill.id, prefill.incarnation, "stream", bandwidth, 1)
    return replace(decode, links=(link,))


@given(fits, st.integers(1, 3000), st.integers(0, 3000), st.integers(2, 512), st.integers(0, 20), st.integers(0, 9000))
def test_one_sum_is_the_sum_over_the_steps(fit, num_tokens, start, chunk, rows, contexts):
    """The oracle: step after step, each by its own features."""
    beside, seconds = StepShape(rows, 0.0, contexts), 0.0
    for at in range(0, num_tokens, chunk):
        size = min(chunk, num_tokens - at)
        pairs = size * (start + at + size / 2)
        shape = StepShape(rows + size, pairs, contexts)
        seconds += sum(w * x for w, x in zip(fit.weights, shape.features(), strict=True))
    assert math.isclose(fit.seconds_of(num_tokens, start, chunk, beside), seconds, rel_tol=1e-9)


@given(st.integers(2, 400), st.integers(0, 2000))
def test_a_fit_predicts_what_its_model_predicts(num_tokens, start):
    model = StepTimeModel()
    assert model.fit() is None
    for size in range(2, 200, 9):
        shape = EMPTY_STEP.with_chunk(size, 3 * size)
        model.observe(shape, 0.01 + 0.0005 * size + 1e-6 * shape.chunk_pairs)
    fit = model.fit()
    assert fit is not None
    predicted = model.predict(EMPTY_STEP.with_chunk(num_tokens, start))
    assert math.isclose(fit.seconds_of(num_tokens, start, 512), predicted, rel_tol=1e-9)


def test_rows_alone_teach_nothing_about_prompts():
    """A decode worker that has computed no prompt says nothing about what one would cost."""
    model = StepTimeModel()
    for rows in range(1, 60):
        model.observe(StepShape(rows, 0.0, 100 * rows), 0.01 + 0.001 * rows)
    assert model.reliable
    assert model.fit() is None


def test_rows_with_drafts_teach_nothing_about_prompts():
    """They have several tokens, as chunks have, and no prompt."""
    model = StepTimeModel()
    for rows in range(1, 60):
        shape = StepShape.of([(1 + rows % 5, 100)] * rows)
        model.observe(shape, 0.01 + 0.001 * shape.num_tokens, has_prompt=False)
    assert model.reliable
    assert model.fit() is None


UNUSABLE = {
    "of another version": (0.1,) * (len(UNITS) - 1),
    "not finite": (0.1, 0.1, math.nan, 0.1, 0.1, 0.1, 0.1),
    "cheaper for more tokens": (0.1, 0.016, 0.0, -0.128, 0.0, 0.1, 0.1),
    "cheaper for more context": (0.1, 0.1, 0.1, 0.1, 0.1, -0.1, 0.1),
}


@pytest.mark.parametrize("weights", UNUSABLE.values(), ids=UNUSABLE)
def test_a_fit_that_cannot_be_used_is_none(weights: tuple[float, ...]):
    fit = StepTimeFit(weights, 0.001)
    assert not fit.usable
    prefill = worker(WorkerRole.PREFILL, WorkerLoad(), fit, BUDGET)
    decode = linked(worker(WorkerRole.DECODE, WorkerLoad(), fit, 64), prefill, 1e9)
    work = PromptLoad(500, 0, 0)
    assert (basis_of(prefill), token_seconds([prefill, decode])) == (CostBasis.CONSTANTS, 0.0)
    assert handover_cost(prefill, decode, work, 0.0) == 500 + 500 / MOVED_TOKENS_PER_COMPUTED
    assert local_cost(decode, work, 0.001) == LOCAL_TOKENS_PER_COMPUTED * 500


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 900), st.floats(1e-3, 1.0)), min_size=20, max_size=60))
def test_what_a_model_tells_never_gets_cheaper_with_length(steps):
    """Whatever the steps took."""
    model = StepTimeModel()
    for count, start, seconds in steps * 4:
        model.observe(EMPTY_STEP.with_chunk(count, start), seconds)
    if (fit := model.fit()) is not None:
        costs = [fit.seconds_of(num_tokens, 0, 4096) for num_tokens in range(1, 4096, 65)]
        assert costs == sorted(costs)


@given(fits, loads, loads, works)
def test_without_any_fit_the_costs_are_the_constants(fit, of_prefill, of_decode, work):
    prefill, decode = (
        worker(WorkerRole.PREFILL, of_prefill, None, BUDGET),
        worker(WorkerRole.DECODE, of_decode, None, 64),
    )
    assert token_seconds([prefill, decode]) == 0.0
    tokens = of_prefill.waiting_tokens + work.num_tokens - work.num_prefill_hit
    moved = (work.num_tokens - work.num_decode_hit) / MOVED_TOKENS_PER_COMPUTED
    assert handover_cost(prefill, linked(decode, prefill, 1e9), work, 0.0) == tokens + moved
    own = of_decode.waiting_tokens + work.num_tokens - work.num_decode_hit
    assert local_cost(decode, work, 0.0) == LOCAL_TOKENS_PER_COMPUTED * own
    assert Pair(prefill, decode).cost_basis is CostBasis.CONSTANTS
    other = worker(WorkerRole.PREFILL, of_prefill, fit, BUDGET)
    assert Pair(other, decode).cost_basis is CostBasis.PREDICTED
    assert local_cost(decode, work, token_seconds([other])) == LOCAL_TOKENS_PER_COMPUTED * own, "it has no fit itself"


@given(fits, fits, loads, loads, works, st.floats(1e5, 1e11), st.integers(1, 2000))
def test_costs_are_finite_and_grow_with_the_work(of_prefill, of_decode, queue, rows, work, bandwidth, more):
    prefill = worker(WorkerRole.PREFILL, queue, of_prefill, BUDGET)
    decode = linked(worker(WorkerRole.DECODE, rows, of_decode, 64), prefill, bandwidth)
    token_s = token_seconds([prefill, decode])
    assert token_s > 0
    longer = replace(work, num_tokens=work.num_tokens + more)
    busier = replace(decode, load=replace(decode.load, running_rows=ROWS))
    for less, greater in (
        (handover_cost(prefill, decode, work, token_s), handover_cost(prefill, decode, longer, token_s)),
        (local_cost(decode, work, token_s), local_cost(decode, longer, token_s)),
        (local_cost(decode, work, token_s), local_cost(busier, work, token_s)),
    ):
        assert 0 < less < math.inf
        assert less <= greater * (1 + 1e-9)


@given(fits, loads, works, st.floats(1e5, 1e11), st.floats(2, 1e3))
def test_a_machine_of_another_speed_makes_the_same_choice(fit, load, work, bandwidth, factor):
    """Twice as slow workers behind links twice as slow: costs are in tokens, so nothing changes."""

    def costs(factor: float) -> tuple[float, float]:
        slower = StepTimeFit(tuple(factor * weight for weight in fit.weights), factor * fit.least_s)
        prefill = worker(WorkerRole.PREFILL, load, slower, BUDGET)
        decode = linked(worker(WorkerRole.DECODE, load, slower, 64), prefill, bandwidth / factor)
        token_s = token_seconds([prefill, decode])
        return handover_cost(prefill, decode, work, token_s), local_cost(decode, work, token_s)

    for one, other in zip(costs(1.0), costs(factor), strict=True):
        assert math.isclose(one, other, rel_tol=1e-6)


LINEAR = StepTimeFit((0.002, 0.016, 0.0, 0.0, 0.0, 0.001, 0.002), 0.001)
"""1 ms a token, 2 ms a step."""
EMPTY = WorkerLoad(available_pages=4000, total_pages=4000)


def choice(prefill_load: WorkerLoad, decode_load: WorkerLoad, num_tokens: int, bandwidth: float = 1e9) -> bool:
    """True if decode computes the prompt itself."""
    prefill = worker(WorkerRole.PREFILL, prefill_load, LINEAR, BUDGET)
    decode = linked(worker(WorkerRole.DECODE, decode_load, LINEAR, 64), prefill, bandwidth)
    keys = {PAGE: tuple[PageKey, ...]()}
    pair = choose_pair(
        [Pair(prefill, decode), Pair(decode, decode)],
        PlacementQuery(num_tokens, num_tokens + 1, keys),
        PrefixIndex(1),
        0,
    )
    assert pair is not None
    return pair.local


def test_the_choice_follows_queue_rows_and_link():
    assert not choice(EMPTY, EMPTY, 500), "an idle prefill worker computes it"
    assert choice(replace(EMPTY, waiting_tokens=3000), EMPTY, 500), "behind a long queue decode is sooner"
    assert not choice(replace(EMPTY, waiting_tokens=3000), replace(EMPTY, running_rows=7), 500), "seven rows would wait"
    assert choice(EMPTY, EMPTY, 500, bandwidth=1e6), "moving 2 MB takes 2 s, computing 0.5 s"
    pulled = LinkRecord(WorkerId("prefill"), Incarnation(1), "stream", 1e9, 1, num_pulled_bytes=10**6, pull_us=10**6)
    prefill = worker(WorkerRole.PREFILL, EMPTY, LINEAR, BUDGET)
    decode = worker(WorkerRole.DECODE, EMPTY, LINEAR, 64)
    work = PromptLoad(500, 0, 0)
    slow, fast = (handover_cost(prefill, replace(decode, links=(one,)), work, 0.001) for one in (
        pulled, replace(pulled, num_pulled_bytes=0),
    ))  # fmt: skip
    assert slow > 2000 > fast, "pulls tell more of a link than its probe"
