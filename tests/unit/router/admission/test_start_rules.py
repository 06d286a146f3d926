"""Who asks without credit, who passes, and when all are held for one that was passed often enough."""

from __future__ import annotations

from baton.services.router.admission.credits import DecodeRoom, PrefillRoom, Shortage
from baton.services.router.admission.slot import Slot, SlotSpec
from baton.services.router.admission.start_rules import ASK_S, HOLD_S, MAX_ASKING, MAX_OVERTAKES, SEEN_S, StartRules


def slot(num_tokens: int, tenant: str = "", order: float = 0.0) -> Slot:
    return Slot(SlotSpec(tenant, num_tokens, 9), order)


def room(pages: int = 4, waiting: int = 0) -> DecodeRoom:
    return DecodeRoom(1000, pages, 20, 4, (PrefillRoom(8.0, waiting),))


def start(rules: StartRules, one: Slot, now: float, first: Slot | None = None) -> Shortage | None:
    assert rules.may_start(one, now)
    shortage = rules.on_start(one, first or one, now)
    one.started_at = now
    return shortage


def test_one_asks_at_a_time_until_it_has_room_or_has_asked_for_long():
    rules = StartRules()
    rules.on_rooms([room()], [], 0.0)
    large, other, third = slot(40), slot(41), slot(42)
    assert start(rules, large, 0.0) is Shortage.DECODE
    assert not rules.may_start(other, ASK_S / 2)
    assert rules.may_start(slot(3), ASK_S / 2)
    assert start(rules, other, ASK_S) is Shortage.DECODE
    assert not rules.may_start(third, ASK_S)
    assert rules.on_room(other)
    assert rules.may_start(third, ASK_S)
    assert rules.on_gone(large)
    assert not rules.on_gone(large)


def test_few_ask_however_long_it_takes():
    rules = StartRules()
    rules.on_rooms([room()], [], 0.0)
    for number in range(MAX_ASKING):
        start(rules, slot(40 + number), number * ASK_S)
    assert not rules.may_start(slot(60), 1000.0)


def test_what_is_short_at_prefill_ends_with_the_first_token():
    rules = StartRules()
    rules.on_rooms([room(waiting=1)], [], 0.0)
    one = slot(9)
    assert start(rules, one, 0.0) is Shortage.PREFILL
    assert not rules.on_room(one)
    assert not rules.may_start(slot(9), 1.0)
    assert rules.on_first_token(one)
    assert rules.may_start(slot(9), 1.0)


def test_one_that_asks_and_waits_for_something_else_holds_up_nobody():
    """There is room for it all the time."""
    rules = StartRules()
    rules.on_rooms([room()], [], 0.0)
    start(rules, slot(40), 0.0)
    other = slot(41)
    rules.on_rooms([room(20)], [], 0.1)
    assert not may_ask(rules, other, 0.1 + SEEN_S)  # there was none in between
    rules.on_rooms([room(20)], [], 0.2)
    rules.on_rooms([room(20)], [], 0.2 + SEEN_S)
    assert may_ask(rules, other, 0.2 + SEEN_S)


def test_one_that_asks_and_that_no_worker_can_hold_holds_up_nobody():
    rules = StartRules()
    rules.on_rooms([room()], [], 0.0)
    start(rules, slot(100), 0.0)
    assert not rules.may_start(slot(41), 0.1)
    rules.on_rooms([room()], [], 0.1)
    assert rules.may_start(slot(41), 0.1)


def passed_often(rules: StartRules, now: float, first: Slot | None = None) -> None:
    """Starts small ones before `first` in line, or before the one that asks."""
    for _ in range(MAX_OVERTAKES):
        rules.on_rooms([room()], [], now)
        start(rules, slot(3, "small"), now, first)


def may_ask(rules: StartRules, one: Slot, now: float) -> bool:
    """Whether it may start when announcements show no room for it."""
    rules.on_rooms([room()], [], now)
    return rules.may_start(one, now)


def test_all_are_held_for_one_that_was_passed_often_enough():
    rules, victim = StartRules(), slot(40, "a", order=5.0)
    passed_often(rules, 1.0, victim)
    small, earlier = slot(3, "small"), slot(3, "a", order=4.0)
    assert not rules.may_start(small, 1.0 + HOLD_S / 2)
    assert not rules.may_start(slot(3, "a", order=6.0), 1.0 + HOLD_S / 2)
    assert rules.may_start(earlier, 1.0 + HOLD_S / 2)
    assert rules.may_start(victim, 1.0 + HOLD_S / 2)
    assert rules.may_start(small, 1.0 + HOLD_S)


def test_a_hold_ends_with_the_room_and_the_second_one_is_longer():
    rules, victim = StartRules(), slot(40)
    rules.on_rooms([room()], [], 0.0)
    start(rules, victim, 0.0)
    passed_often(rules, 1.0)
    assert not rules.may_start(slot(3), 1.0)
    now = 1.0 + HOLD_S
    passed_often(rules, now)
    assert not rules.may_start(slot(3), now + 1.5 * HOLD_S)
    assert rules.on_room(victim)
    assert rules.may_start(slot(3), now)


def test_a_hold_ends_with_a_request_that_leaves_or_without_announcements():
    for leaves in (True, False):
        rules, victim = StartRules(), slot(40)
        rules.on_rooms([room()], [], 0.0)
        passed_often(rules, 0.0, victim)
        assert not rules.may_start(slot(3), 0.0)
        if leaves:
            rules.on_gone(victim)
        else:
            rules.on_rooms((), [], 1.0)
        assert rules.may_start(slot(3), 0.0)
