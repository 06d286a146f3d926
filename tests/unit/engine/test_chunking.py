"""Cutting prompts into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import AttemptId, RequestId
from baton.domain.timing.step_time import EMPTY_STEP, MIN_STEPS, StepShape, StepTimeModel
from baton.engine.chunking import Blocks, ChunkBudget, ChunkPolicy, StepBudget, cut
from tests.tiny_workers import REPEATABLE_SETTINGS


@pytest.mark.parametrize(
    ("start", "end", "budget_tokens", "expected"),
    [
        (0, 5, 8, 5),  # all of it
        (0, 5, 5, 5),
        (0, 9, 5, 4),  # up to the last page edge within the budget
        (4, 9, 3, 2),
        (4, 9, 1, 0),  # no edge within the budget
        (3, 9, 1, 1),  # the rest of a page that is begun
        (0, 9, 0, 0),
    ],
)
def test_cut_ends_on_a_page_edge_or_at_the_end(start: int, end: int, budget_tokens: int, expected: int):
    assert cut(start, end, budget_tokens, page_size=2) == expected


@REPEATABLE_SETTINGS
@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 20), st.integers(1, 5))
def test_a_cut_is_the_longest_that_may_be(start: int, length: int, budget_tokens: int, page_size: int):
    end = start + length
    num_tokens = cut(start, end, budget_tokens, page_size)
    may_be = [n for n in range(min(budget_tokens, length) + 1) if n in (0, length) or (start + n) % page_size == 0]
    assert num_tokens == max(may_be)


@REPEATABLE_SETTINGS
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 9))
def test_a_budget_of_one_page_always_reaches_the_end(end: int, page_size: int, more: int):
    start = num_steps = 0
    while start < end:
        start += cut(start, end, page_size + more, page_size)
        num_steps += 1
        assert num_steps <= end
    assert start == end


@st.composite
def prompts_with_blocks(draw: st.DrawFn) -> tuple[int, Blocks]:
    """A length, and blocks of up to 9 tokens, one after another."""
    blocks, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=4)):
        blocks.append((at + gap, at + gap + length))
        at += gap + length
    return at + draw(st.integers(1, 9)), blocks


def may_end(place: int, blocks: Blocks) -> bool:
    return not any(first < place < last for first, last in blocks)


@REPEATABLE_SETTINGS
@given(prompts_with_blocks(), st.integers(0, 30), st.integers(0, 20), st.integers(1, 5))
def test_a_cut_never_falls_into_a_block(prompt: tuple[int, Blocks], start: int, budget_tokens: int, page_size: int):
    """It ends on the last free page edge within the budget; without one, on the last border of a block."""
    end, blocks = prompt
    start = min(start, end - 1)
    num_tokens = cut(start, end, budget_tokens, page_size, blocks)
    places = range(start + 1, min(start + budget_tokens, end) + 1)
    edges = [at for at in places if at == end or (at % page_size == 0 and may_end(at, blocks))]
    borders = [at for block in blocks for at in block if at in places and may_end(at, blocks)]
    assert start + num_tokens == max(edges, default=max(borders, default=start))


@REPEATABLE_SETTINGS
@given(prompts_with_blocks(), st.integers(1, 5))
def test_a_step_advances_its_first_prompt_whatever_its_blocks(prompt: tuple[int, Blocks], page_size: int):
    """A block that does not fit is given whole, to the first prompt alone."""
    first, second = (AttemptId(RequestId(name), 1) for name in "ab")
    end, blocks = prompt
    start = 0
    while start < end:
        step = StepBudget(page_size, page_size)
        step.give(first, start, end, page_size, blocks)
        num_tokens = step.given(first)
        step.give(second, start, end, page_size, blocks)
        assert 0 < num_tokens <= max(page_size, 9)
        assert may_end(start + num_tokens, blocks) or start + num_tokens == end
        assert step.given(second) <= max(0, page_size - num_tokens)
        start += num_tokens
    assert start == end


def test_a_prompt_at_an_image_is_not_starved_by_longer_ones():
    """Of those that come later, one gets an image that does not fit; without a page left, none does."""
    first, second, third = (AttemptId(RequestId(name), 1) for name in "abc")
    step = StepBudget(512, 16)
    step.give(first, 0, 100_000, 384)
    for id in (second, third):
        step.give(id, 10, 400, 384, [(10, 266)])
    assert [step.given(id) for id in (first, second, third)] == [384, 256, 0]
    full = StepBudget(384, 16)
    full.give(first, 0, 100_000, 384)
    full.give(second, 10, 400, 384, [(10, 266)])
    assert full.given(second) == 0


@REPEATABLE_SETTINGS
@given(st.lists(prompts_with_blocks(), min_size=1, max_size=4), st.integers(1, 30), st.integers(1, 5))
def test_a_step_has_at_most_its_budget_and_one_block(prompts: list[tuple[int, Blocks]], budget: int, page_size: int):
    step = StepBudget(max(budget, page_size), page_size)
    for number, (end, blocks) in enumerate(prompts):
        step.give(AttemptId(RequestId(str(number)), 1), 0, end, budget, blocks)
    largest = max((last - first for _, blocks in prompts for first, last in blocks), default=0)
    assert step.left >= -largest


def seconds(shape: StepShape) -> float:
    """A machine with 1 ms a token, and 0.1 us for each token that a chunk's token attends to."""
    return 0.005 + 0.001 * shape.num_tokens + 1e-7 * (shape.chunk_pairs + shape.row_contexts)


def taught(num_steps: int = 60) -> StepTimeModel:
    model = StepTimeModel()
    for step in range(num_steps):
        rows, start = step % 5, 997 * step % 8000
        shape = StepShape.of([*((1, 500 + step),) * rows, (1 + 37 * step % 300, start)])
        model.observe(shape, seconds(shape))
    return model


def sizer(chunking: ChunkPolicy, model: StepTimeModel | None, itl_objective_s: float = 0.0) -> ChunkBudget:
    return ChunkBudget(256, 16, chunking, model, itl_objective_s)


ROWS = StepShape.of([(1, 1000)] * 6)


@pytest.mark.parametrize("chunking", ChunkPolicy)
@pytest.mark.parametrize("model", [None, StepTimeModel(), taught(MIN_STEPS - 1)])
def test_without_a_reliable_prediction_the_budget_counts(chunking: ChunkPolicy, model: StepTimeModel | None):
    chunks = sizer(chunking, model, itl_objective_s=1e-6)
    assert chunks.tokens(EMPTY_STEP, 0) == 256
    assert chunks.tokens(ROWS, 5000) == 250
    assert chunks.tokens(StepShape.of([(1, 10)] * 250), 0) == 16  # a page, whatever the rows leave


def test_fixed_chunks_do_not_shrink_with_the_context():
    assert sizer(ChunkPolicy.FIXED, taught()).tokens(EMPTY_STEP, 7000) == 256


def test_equal_chunks_take_the_time_of_the_first():
    chunks = sizer(ChunkPolicy.EQUAL, taught())
    sizes = [chunks.tokens(EMPTY_STEP, start) for start in (0, 1000, 2000, 4000, 8000)]
    assert sizes[0] == 256
    assert sizes == sorted(sizes, reverse=True)
    first_s = seconds(EMPTY_STEP.with_chunk(256, 0))
    for start, size in zip((1000, 2000, 4000, 8000), sizes[1:], strict=True):
        assert seconds(EMPTY_STEP.with_chunk(size, start)) == pytest.approx(first_s, rel=0.05)


@pytest.mark.parametrize("start", [0, 2000, 8000])
@pytest.mark.parametrize("objective_s", [0.05, 0.1, 0.2])
def test_chunks_hold_the_objective_beside_rows(objective_s: float, start: int):
    size = sizer(ChunkPolicy.ITL, taught(), objective_s).tokens(ROWS, start)
    assert 16 <= size <= 250
    assert seconds(ROWS.with_chunk(size, start)) <= objective_s
    if size < 250:
        assert seconds(ROWS.with_chunk(size, start)) > 0.7 * objective_s


def test_an_objective_that_cannot_be_held_leaves_a_page():
    assert sizer(ChunkPolicy.ITL, taught(), 0.001).tokens(ROWS, 2000) == 16
