"""Credits for both phases, as tables: what is short, what is counted down, and what comes back."""

from __future__ import annotations

import math

import pytest

from baton.domain.timing.row_limit import RowObjective
from baton.domain.timing.step_time import StepTimeFit
from baton.services.router.admission.credits import Credits, DecodeRoom, PrefillRoom, Shortage
from baton.services.router.admission.slot import Slot, SlotSpec

FIT = StepTimeFit((0.010, 0.016, 0.0, 0.0, 0.0, 0.0, 4.096), 0.0)
"""10 ms a step, 1 ms a row and 1 ms a token of context."""


def spec(num_tokens: int, max_tokens: int = 9) -> SlotSpec:
    return SlotSpec("", num_tokens, max_tokens)


def slot(num_tokens: int) -> Slot:
    return Slot(spec(num_tokens), 0.0)


def decode(rows: int = 4, pages: int = 10, *prefills: PrefillRoom, **rest) -> DecodeRoom:
    return DecodeRoom(rows, pages, 20, 4, prefills or (PrefillRoom(math.inf),), **rest)


def credits(*rooms: DecodeRoom) -> Credits:
    found = Credits()
    found.update(rooms)
    return found


@pytest.mark.parametrize(
    ("rooms", "num_tokens", "shortage"),
    [
        ([], 1000, None),  # nothing is known
        ([decode()], 39, None),
        ([decode()], 40, Shortage.DECODE),  # the first output token takes a page more
        ([decode(rows=0)], 1, Shortage.DECODE),
        ([decode(rows=0), decode()], 1, None),
        ([decode(rows=9, pages=1), decode(rows=0)], 7, Shortage.DECODE),
        ([decode(4, 10, PrefillRoom(8, 1))], 8, None),
        ([decode(4, 10, PrefillRoom(8, 1))], 9, Shortage.PREFILL),
        ([decode(4, 10, PrefillRoom(8, 0))], 9, None),  # none waits there
        ([decode(4, 10, PrefillRoom(8, 1), PrefillRoom(9, 1))], 9, None),
        ([decode(4, 10, PrefillRoom(8, 1)), decode(4, 1, PrefillRoom(9, 1))], 9, Shortage.PREFILL),  # not one pair
        ([decode(4, 10, PrefillRoom(0, 1), local=True)], 9, None),
        ([decode(objective=RowObjective(FIT, 0.020, 1, 4))], 4, None),  # 10 + 2 + 8 ms
        ([decode(objective=RowObjective(FIT, 0.020, 1, 4))], 5, Shortage.STEP),
        ([decode(objective=RowObjective(FIT, 0.020, 0, 0))], 30, None),  # one in any case
    ],
)
def test_a_request_has_credit_if_one_pair_has_room_in_both_phases(rooms, num_tokens, shortage):
    assert credits(*rooms).shortage(spec(num_tokens)) is shortage


def test_one_token_needs_no_decode_worker():
    assert credits(decode(rows=0)).shortage(spec(9, max_tokens=1)) is None


def test_what_starts_is_counted_down_and_comes_back():
    prefill = PrefillRoom(10, 1)
    found = credits(decode(2, 6, prefill))
    first, second = slot(9), slot(11)
    found.take(first)
    assert found.shortage(spec(1)) is None
    assert found.shortage(spec(2)) is Shortage.PREFILL
    found.take(first)  # once
    assert found.on_first_token(first)
    assert not found.on_first_token(first)
    assert found.shortage(spec(10)) is None
    found.take(second)
    assert found.shortage(spec(1)) is Shortage.DECODE  # no row
    found.give_back(first)
    found.give_back(first)
    assert found.shortage(spec(10)) is None
    assert found.shortage(spec(12)) is Shortage.DECODE  # its three pages are there again, the others are not


def test_an_announcement_replaces_all_but_what_started_just_now():
    found = credits(decode(2, 6))
    known, new = slot(9), slot(9)
    found.take(known)
    found.take(new)
    found.update([decode(2, 6)], [new])
    assert found.shortage(spec(11)) is None
    assert found.shortage(spec(12)) is Shortage.DECODE
    found.give_back(known)  # the announcement shows it, or will
    assert found.shortage(spec(12)) is Shortage.DECODE
    found.give_back(new)
    assert found.shortage(spec(23)) is None


def test_contexts_that_start_count_in_the_objective():
    found = credits(decode(objective=RowObjective(FIT, 0.020, 0, 0)))
    first = slot(4)
    found.take(first)
    assert found.shortage(spec(4)) is None
    assert found.shortage(spec(5)) is Shortage.STEP
    found.give_back(first)
    assert found.shortage(spec(5)) is None


def test_what_can_never_fit_is_known():
    found = credits(decode(0, 0))
    assert found.may_ever_fit(spec(79))
    assert not found.may_ever_fit(spec(80))
