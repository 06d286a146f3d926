"""Rows of a decode worker within an objective on the time between tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.timing.row_limit import within_tpot
from baton.domain.timing.step_time import StepShape, StepTimeFit
from baton.domain.worker import PageCounts, WorkerBudgets, WorkerLoad, WorkerRecord, WorkerRole

SIMPLE = StepTimeFit((0.010, 0.016, 0.0, 0.0, 0.0, 0.0, 4.096), 0.0)
"""10 ms a step, 1 ms a row and 1 ms a token of context."""


def decode(fit: StepTimeFit | None, rows: int = 8, running: int = 0, live_pages: int = 0) -> WorkerRecord:
    load = WorkerLoad(running_rows=running, step_time=fit, pages=replace(PageCounts(), live=live_pages))
    return WorkerRecord(
        WorkerId("decode-0"), WorkerRole.DECODE, Incarnation(1), "", "m", "f", page_size=2, max_model_len=100,
        vocab_size=10, budgets=WorkerBudgets(rows=rows), load=load,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("max_tpot_s", "running", "live_pages", "rows"),
    [
        (math.inf, 0, 0, 8),
        (0.0185, 0, 0, 8),  # 10 + 8 ms
        (0.0175, 0, 0, 7),
        (0.0125, 0, 0, 2),
        (0.001, 0, 0, 1),  # one in any case
        (0.020, 2, 4, 2),  # four tokens a row: 5 ms more a row
        (0.024, 2, 4, 2),
        (0.026, 2, 4, 3),
    ],
)
def test_rows_are_bounded_by_the_time_of_a_step(max_tpot_s, running, live_pages, rows):
    assert within_tpot(decode(SIMPLE, 8, running, live_pages), max_tpot_s).budgets.rows == rows


@pytest.mark.parametrize(
    ("context", "running", "live_pages", "rows"),
    [
        (0.0, 0, 0, 8),
        (4.0, 0, 0, 2),  # 10 ms, and 5 ms a row
        (9.0, 0, 0, 1),
        (99.0, 0, 0, 1),  # one in any case
        (0.0, 1, 2, 2),  # as long as the one that runs
        (8.0, 1, 2, 1),  # 10 + 5 + 9 ms
        (2.0, 1, 2, 2),  # 10 + 5 + 3 ms
        (1.0, 1, 2, 3),
        (1.0, 4, 8, 2),  # those that run are too many
    ],
)
def test_rows_that_may_come_count_with_their_own_contexts(context, running, live_pages, rows):
    assert within_tpot(decode(SIMPLE, 8, running, live_pages), 0.0205, context).budgets.rows == rows


def test_without_a_fit_to_go_by_all_rows_stay():
    falling = StepTimeFit((0.010, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0)
    for record in (decode(None), decode(falling), decode(SIMPLE, rows=1), decode(SIMPLE, rows=0)):
        assert within_tpot(record, 1e-6) is record


WEIGHTS = st.tuples(*[st.floats(0.0, 1.0)] * 7)


CONTEXTS = st.just(0.0) | st.floats(0.0, 1000.0)


@given(WEIGHTS, st.integers(1, 64), st.integers(0, 64), st.integers(0, 500), CONTEXTS, st.floats(1e-4, 10.0))
def test_no_row_is_refused_that_fits_and_none_taken_that_does_not(weights, rows, running, live, new, max_tpot_s):
    fit = StepTimeFit(weights, 0.0)
    record = decode(fit, rows, running, live)
    given_rows = within_tpot(record, max_tpot_s, new).budgets.rows
    context = live * 2 / running if running else new

    def step_s(num: int) -> float:
        if num <= running:
            return fit.seconds_of_rows(StepShape(num, 0.0, round(num * context)))
        contexts = (live * 2 if running else 0) + (num - running) * (new or context)
        return fit.seconds_of_rows(StepShape(num, 0.0, round(contexts)))

    assert 1 <= given_rows <= rows
    assert given_rows == 1 or step_s(given_rows) <= max_tpot_s
    assert given_rows == rows or step_s(given_rows + 1) > max_tpot_s
