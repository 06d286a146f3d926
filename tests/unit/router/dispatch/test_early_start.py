"""When a prompt may start before its reservation."""

from dataclasses import replace

import pytest

from baton.domain.ids import AttemptId, Incarnation, RequestId
from baton.domain.worker import WorkerBudgets, WorkerLoad
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.prefill.early_start import (
    MAX_SILENCE_S,
    OFF_S,
    WINDOW_S,
    EarlyStartLimit,
    has_room_twice,
)
from tests.unit.router.dispatch.test_placement import decode, prefill

DECODE, OTHER = Incarnation(1), Incarnation(2)


@pytest.mark.parametrize(
    ("pages", "rows", "running", "fits"),
    [(6, 8, 0, True), (5, 8, 0, False), (6, 8, 6, True), (6, 8, 7, False), (6, 1, 0, False)],
)
def test_there_must_be_room_for_two_such_prompts(pages, rows, running, fits):
    load = WorkerLoad(running_rows=running, available_pages=pages, total_pages=64)
    worker = replace(decode(0), load=load, page_size=4, budgets=WorkerBudgets(rows=rows))
    assert has_room_twice(Pair(prefill(0), worker), 10) is fits  # 11 slots: three pages


@pytest.mark.parametrize(
    ("running", "reserved", "bound", "fits"),
    [(2, 4, None, True), (2, 5, None, False), (0, 7, None, False), (0, 2, 4, True), (0, 3, 4, False), (7, 0, 4, False)],
)
def test_reservations_count_before_they_are_rows(running, reserved, bound, fits):
    load = WorkerLoad(running_rows=running, waiting_requests=reserved, available_pages=64, total_pages=64)
    worker = replace(decode(0), load=load, page_size=4, budgets=WorkerBudgets(rows=8, reservations=bound))
    assert has_room_twice(Pair(prefill(0), worker), 10) is fits


def test_one_start_without_room_is_allowed_a_second_one_is_not():
    limit = EarlyStartLimit()
    for at in (0.0, 1.0):
        assert limit.allows(at, DECODE)
        limit.on_started(at)
        limit.on_without_room(at)
    assert [limit.allows(at, DECODE) for at in (1.0, 1.0 + OFF_S - 0.1, 1.0 + OFF_S)] == [False, False, True]


def test_a_fiftieth_without_room_is_allowed():
    limit = EarlyStartLimit()
    for number in range(1000):
        limit.on_started(number / 200)
    for _ in range(20):
        limit.on_without_room(5.0)
    assert limit.allows(5.0, DECODE)
    limit.on_without_room(5.0)
    assert not limit.allows(5.0, DECODE)


def test_what_is_older_than_the_window_does_not_count():
    limit = EarlyStartLimit()
    for at in range(0, 10 * WINDOW_S, WINDOW_S):
        limit.on_started(at)
        limit.on_without_room(at)
        assert limit.allows(at, DECODE)


def test_nothing_starts_for_a_decode_worker_that_owes_an_answer():
    """It may hang: each start would be in vain. Others are asked as before, and so is it once it has answered."""
    limit, first, second = EarlyStartLimit(), AttemptId(RequestId("a"), 1), AttemptId(RequestId("b"), 1)
    limit.on_asked(DECODE, first, 0.0)
    limit.on_asked(DECODE, second, 1.0)
    late = MAX_SILENCE_S + 0.5
    assert [limit.allows(at, DECODE) for at in (MAX_SILENCE_S, late)] == [True, False]
    assert limit.allows(late, OTHER)
    limit.on_answered(DECODE, first)
    assert [limit.allows(at, DECODE) for at in (late, 1.0 + late)] == [True, False]
    limit.on_answered(DECODE, second)
    assert limit.allows(1.0 + late, DECODE)
    assert limit._asked == {}
