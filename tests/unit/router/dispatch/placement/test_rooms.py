"""The room of pairs as records tell: rows, pages, prompts that wait, and the time of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.domain.timing.step_time import StepTimeFit
from baton.domain.worker import MediaCounts, WorkerBudgets, WorkerRecord
from baton.services.router.admission.credits import DecodeRoom, PrefillRoom
from baton.services.router.dispatch.placement.pair import linked_pairs
from baton.services.router.dispatch.placement.rooms import find_rooms
from tests.unit.router.dispatch.test_placement import PAGE, decode, link, prefill

FIT = StepTimeFit((0.010, 0.016, 0.0, 0.0, 0.0, 0.0, 4.096), 0.0)


def linked(one: WorkerRecord, *prefills: WorkerRecord, **budgets: int) -> WorkerRecord:
    return replace(one, links=tuple(map(link, prefills)), budgets=replace(one.budgets, **budgets))


def rooms(*records: WorkerRecord, max_tpot_s: float = math.inf) -> list[DecodeRoom]:
    return find_rooms(linked_pairs(records), max_tpot_s)


def test_rows_and_pages_are_those_that_nobody_has_or_has_reserved():
    first, second = prefill(0, available_pages=9, waiting_tokens=30, waiting_requests=2), prefill(1)
    found = rooms(
        first, second, linked(decode(0, running_rows=1, waiting_requests=2, available_pages=7), first, second)
    )
    prefills = (PrefillRoom(9 * PAGE - 30, 2), PrefillRoom(50 * PAGE, 0))
    assert found == [DecodeRoom(1, 7, 50, PAGE, prefills)]


@pytest.mark.parametrize(("reservations", "rows"), [(None, 3), (1, 0), (3, 2), (9, 3)])
def test_a_bound_of_reservations_counts(reservations, rows):
    source = prefill(0)
    one = linked(decode(0, waiting_requests=1), source)
    one = replace(one, budgets=WorkerBudgets(rows=4, reservations=reservations))
    assert [room.num_rows for room in rooms(source, one)] == [rows]


def test_workers_share_what_prefill_has_room_for():
    source = prefill(0, waiting_requests=1)
    one, other = rooms(source, linked(decode(0), source), linked(decode(1), source))
    assert one.prefills[0] is other.prefills[0]


def test_a_worker_that_computes_prompts_itself_needs_no_other():
    (room,) = rooms(linked(decode(0), prefill_tokens=8))
    assert room.local
    assert room.prefills == ()


def test_images_that_wait_take_no_pages():
    source = prefill(0, waiting_requests=1, waiting_tokens=10_000)
    source = replace(source, load=replace(source.load, media=MediaCounts(max_bytes=1)))
    (room,) = rooms(source, linked(decode(0), source))
    assert room.prefills == (PrefillRoom(math.inf, 1),)


def test_contexts_are_those_of_all_pages_in_use():
    source = prefill(0)
    one = linked(decode(0, running_rows=1, waiting_requests=1, available_pages=48), source)
    one = replace(one, load=replace(one.load, step_time=FIT))
    (room,) = rooms(source, one, max_tpot_s=0.0305)
    assert room.objective is not None
    assert (room.objective.num_rows, room.objective.context_tokens) == (2, 2 * PAGE)
    assert room.objective.allows(1, 9)  # 10 + 3 + 8 + 9 ms
    assert not room.objective.allows(1, 10)
    assert rooms(source, one)[0].objective is None
