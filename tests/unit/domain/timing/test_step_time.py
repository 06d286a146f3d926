"""The step-time model learns a cost with knees, follows a change of speed, and admits that it does not know."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.timing.step_time import (
    EMPTY_STEP,
    FORGETTING,
    INITIAL_VARIANCE,
    MAX_TRACE,
    MIN_STEPS,
    UNITS,
    StepShape,
    StepTimeModel,
)


def true_seconds(shape: StepShape) -> float:
    """A machine that loads weights for up to 64 tokens at a time and computes beyond."""
    num_tokens = shape.num_tokens
    weights = 0.012 + 0.0004 * min(num_tokens, 4) + 0.002 * min(60, max(0, num_tokens - 4))
    products = 0.0011 * max(0, num_tokens - 64)
    return weights + products + 1.6e-7 * shape.chunk_pairs + 6e-7 * shape.row_contexts


def draw(rng: random.Random) -> StepShape:
    """A mixed step: up to 23 rows and two chunks."""
    rows = [(1, rng.randrange(10, 3000)) for _ in range(rng.randrange(24))]
    chunks = [(rng.randrange(2, 512), rng.randrange(8000)) for _ in range(rng.choice([0, 0, 1, 2]))]
    return StepShape.of([*rows, *chunks] or [(1, 5)])


def learn(model: StepTimeModel, num_steps: int, seed: int, slowdown: float = 1.0) -> list[float]:
    """Relative errors of predictions one step ahead, under noise of 3 %."""
    rng, errors = random.Random(seed), []
    for _ in range(num_steps):
        shape = draw(rng)
        seconds = true_seconds(shape) * slowdown * rng.lognormvariate(0.0, 0.03)
        errors.append(abs(model.predict(shape) / seconds - 1))
        model.observe(shape, seconds)
    return errors


def test_the_shape_of_a_mixed_step():
    """Two rows of contexts 11 and 21, and a chunk of 4 tokens after 100: its tokens attend to 101 to 104."""
    shape = StepShape.of([(1, 10), (1, 20), (4, 100)])
    assert shape == StepShape(6, 4 * 102, 32)
    assert EMPTY_STEP.with_chunk(4, 100).with_chunk(1, 10).with_chunk(1, 20) == shape


def full_fit(shapes: list[StepShape], seconds: list[float]) -> list[list[float]]:
    """The covariance of the squares after these steps, with all its entries. They do not depend on the weights."""
    size = len(UNITS)
    covariance = [[INITIAL_VARIANCE * (i == j) for j in range(size)] for i in range(size)]
    for shape, time_s in zip(shapes, seconds, strict=True):
        x = [value / time_s for value in shape.features()]
        spread = [sum(a * b for a, b in zip(row, x, strict=True)) for row in covariance]
        over = FORGETTING + sum(a * b for a, b in zip(x, spread, strict=True))
        covariance = [[covariance[i][j] - spread[i] * spread[j] / over for j in range(size)] for i in range(size)]
        trace = sum(covariance[i][i] for i in range(size))
        factor = min(1 / FORGETTING, max(1.0, MAX_TRACE / trace)) if trace > 0 else 1.0
        covariance = [[value * factor for value in row] for row in covariance]
    return covariance


def test_half_of_the_covariance_stands_for_all_of_it():
    rng, model = random.Random(3), StepTimeModel()
    shapes = [draw(rng) for _ in range(300)]
    seconds = [true_seconds(shape) * rng.lognormvariate(0.0, 0.03) for shape in shapes]
    for shape, time_s in zip(shapes, seconds, strict=True):
        model.observe(shape, time_s)
    full = full_fit(shapes, seconds)
    assert model._covariance == [full[i][j] for i in range(len(UNITS)) for j in range(i, len(UNITS))]


@pytest.mark.parametrize("seed", range(5))
def test_mixed_steps_are_predicted_within_five_percent(seed: int):
    model = StepTimeModel()
    errors = learn(model, 300, seed)
    assert statistics.median(errors[60:]) < 0.05
    assert sorted(errors[60:])[216] < 0.10  # p90
    assert model.reliable
    assert model.error < 0.05


@pytest.mark.parametrize("slowdown", [1.5, 0.5, 4.0])
def test_a_change_of_speed_is_followed_within_forty_steps(slowdown: float):
    model = StepTimeModel()
    learn(model, 300, 1)
    errors = learn(model, 120, 2, slowdown)
    assert statistics.median(errors[:5]) > 0.2
    assert statistics.median(errors[40:]) < 0.08


def test_long_runs_of_one_shape_do_not_break_it():
    """Nothing is learned of other shapes for 5,000 steps; the first ones of them correct it."""
    model, rows = StepTimeModel(), StepShape.of([(1, 100)] * 4)
    for _ in range(5000):
        model.observe(rows, true_seconds(rows))
    assert model.predict(rows) == pytest.approx(true_seconds(rows), rel=0.01)
    errors = learn(model, 60, 3)
    assert statistics.median(errors[20:]) < 0.1


def test_a_model_without_steps_knows_nothing():
    model = StepTimeModel()
    assert (model.predict(StepShape.of([(1, 5)])), model.error, model.reliable) == (0.0, 1.0, False)
    learn(model, MIN_STEPS - 1, 4)
    assert not model.reliable


def test_times_without_a_pattern_are_not_reliable():
    """A machine that is now fast, now 50 times slower: users fall back."""
    model, rng = StepTimeModel(), random.Random(5)
    for _ in range(200):
        shape = draw(rng)
        model.observe(shape, true_seconds(shape) * rng.choice([1.0, 50.0]))
    assert not model.reliable


def test_steps_that_no_clock_saw_pass_are_ignored():
    model = StepTimeModel()
    model.observe(StepShape.of([(1, 5)]), 0.0)
    model.observe(EMPTY_STEP, 1.0)
    assert model.num_steps == 0


@given(
    target_s=st.floats(0.0, 2.0), start=st.integers(0, 8000), rows=st.integers(0, 16), max_tokens=st.integers(0, 2048)
)
def test_the_largest_chunk_holds_its_target(target_s: float, start: int, rows: int, max_tokens: int):
    model = LEARNED
    beside = StepShape.of([(1, 500)] * rows)
    largest = model.largest_chunk(target_s, beside, start, max_tokens)
    assert 0 <= largest <= max_tokens
    if largest:
        assert model.predict(beside.with_chunk(largest, start)) <= target_s
    if largest < max_tokens:
        assert model.predict(beside.with_chunk(largest + 1, start)) > target_s


def test_a_prompt_takes_the_time_of_its_chunks():
    seconds = LEARNED.seconds_of(1000, 200, 512)
    chunks = [EMPTY_STEP.with_chunk(512, 200), EMPTY_STEP.with_chunk(488, 712)]
    assert seconds == pytest.approx(sum(map(LEARNED.predict, chunks)))
    assert seconds == pytest.approx(sum(map(true_seconds, chunks)), rel=0.05)
    assert LEARNED.seconds_of(0, 200, 512) == 0.0


LEARNED = StepTimeModel()
learn(LEARNED, 300, 9)


@pytest.mark.parametrize("unevenness", [(1.0, 1.0, 1.0, 1.0, 1.3, 4.0), (1.0, 1.0, 1.0, 0.5), (1.0,) * 50 + (30.0,)])
def test_steps_of_uneven_times_are_predicted_for_ever(unevenness: tuple[float, ...]):
    """Rows of one decode worker: seconds that are off by the same in the long run are no change of speed."""
    rng, model = random.Random(1), StepTimeModel()
    for step in range(13_000):
        shape = StepShape.of([(1, 50 + step % 500)])
        model.observe(shape, 0.001 * (1 + 1e-5 * shape.row_contexts) * rng.choice(unevenness))
    assert 0.0005 < model.predict(StepShape.of([(1, 300)])) < 0.003
