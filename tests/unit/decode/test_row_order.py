"""Which row gives way and which comes back: by arrival, and by priority with ageing."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.request import StopParams
from baton.services.decode.rows.order import AGEING_S, MIN_TOKENS, RowOrder
from tests.tiny_workers import TinyDecode, assert_idle, engine_request, expected_output, tiny_decode
from tests.unit.decode.test_scheduler import board, run_to_the_end, tokens_of

BY_ARRIVAL, BY_PRIORITY = RowOrder(), RowOrder(by_priority=True)


@dataclass
class FakeRow:
    arrival_number: int
    level: float = 0.0
    preempted_at: float = 0.0
    resumed_with: int | None = None
    num_output_tokens: int = 0


def test_by_arrival_the_newest_gives_way_and_the_oldest_comes_back():
    rows = [FakeRow(0, level=-3.0), FakeRow(1), FakeRow(2, level=3.0)]
    assert BY_ARRIVAL.victim(rows) is rows[2]
    assert BY_ARRIVAL.next_back(rows, 1000.0) is rows[0]


def test_by_priority_the_lowest_gives_way_and_the_highest_comes_back():
    rows = [FakeRow(0), FakeRow(1, level=-1.0), FakeRow(2, level=-1.0), FakeRow(3, level=2.0), FakeRow(4, level=2.0)]
    assert BY_PRIORITY.victim(rows) is rows[2], "of equals the newest"
    assert BY_PRIORITY.next_back(rows, 0.0) is rows[3], "of equals the oldest"


def test_a_row_that_waits_gains_levels_and_keeps_them():
    low, high = FakeRow(0, level=-1.0, preempted_at=0.0), FakeRow(1, level=2.0, preempted_at=10.0)
    assert BY_PRIORITY.next_back([low, high], 10.0) is low, "five levels in ten seconds"
    BY_PRIORITY.on_resumed(low, 10.0)
    assert low.level == -1.0 + 10.0 // AGEING_S
    low.resumed_with = None
    assert BY_PRIORITY.victim([low, high]) is high


def test_a_row_that_came_back_keeps_its_pages_for_a_while():
    back, other = FakeRow(0, level=-3.0), FakeRow(1, level=3.0)
    BY_PRIORITY.on_resumed(back, 0.0)
    back.num_output_tokens = MIN_TOKENS - 1
    assert BY_PRIORITY.victim([back, other]) is other
    assert BY_PRIORITY.victim([back]) is back, "unless no other can give way"
    back.num_output_tokens = MIN_TOKENS
    assert BY_PRIORITY.victim([back, other]) is back


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.floats(0.0, 60.0))
def test_whoever_waits_longest_comes_back_in_the_end(priorities: list[int], at: float):
    """Ageing bounds the wait: one of six levels less that waits twelve seconds longer is not behind."""
    rows = [FakeRow(n, float(priority), at) for n, priority in enumerate(priorities)]
    first = FakeRow(99, -3.0, at - 7 * AGEING_S)
    assert BY_PRIORITY.next_back([*rows, first], at) is first


def rows_of(priorities: tuple[int, int], order: RowOrder) -> tuple[TinyDecode, list]:
    """Two rows of four of eight pages that need eight in the end."""
    world = tiny_decode(digests=True, num_host_pages=8, order=order)
    prompts = ([0, 1, 1, 0, 1, 0, 1], [1, 1, 0, 1, 1, 0, 1])
    requests = [
        engine_request(name, prompt, stop=StopParams(max_tokens=9), priority=priority)
        for name, prompt, priority in zip(("old", "new"), prompts, priorities, strict=True)
    ]
    for request in requests:
        board(world, request)
    return world, requests


def preempted_name(world: TinyDecode) -> str:
    while not world.scheduler.num_preempted:
        batch = world.scheduler.schedule(0.0)
        assert batch is not None
        world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    return str(world.scheduler._preempted[0].request.id.request_id)


def test_an_old_row_of_low_priority_gives_way_to_a_new_one():
    assert preempted_name(rows_of((-1, 1), BY_PRIORITY)[0]) == "old"
    assert preempted_name(rows_of((1, -1), BY_PRIORITY)[0]) == "new"
    assert preempted_name(rows_of((-1, 1), BY_ARRIVAL)[0]) == "new"


def test_every_row_still_has_its_own_tokens():
    world, requests = rows_of((-3, 3), BY_PRIORITY)
    effects = run_to_the_end(world)
    assert world.scheduler.num_preemptions > 0
    for request in requests:
        assert tokens_of(effects, request) == expected_output(request)[1:]
    assert_idle(world.cache)
