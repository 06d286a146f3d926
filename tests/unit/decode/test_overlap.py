"""A step ahead: what is in it, what drops its tokens, when pages come back, and what makes a turn run plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import Broken
from baton.domain.request import EngineRequest, FinishReason, SamplingParams, StopParams
from baton.engine.batch import Batch
from baton.engine.overlap.fake_async_runner import FakeAsyncRunner, FakeStep
from baton.kv.pages import Hold, Owner
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from tests.property.overlap.overlap_machine import WatchedPool
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, assert_idle, engine_request, expected_output, tiny_decode
from tests.unit.decode.test_scheduler import board


class Overlapped:
    """A tiny decode worker, driven step by step."""

    def __init__(self, token_budget: int = 0) -> None:
        pool = WatchedPool(NUM_PAGES)
        self.world = tiny_decode(True, 4, decode_scheduler=OverlapScheduler, token_budget=token_budget, pool=pool)
        assert isinstance(self.world.scheduler, OverlapScheduler)
        self.scheduler, self.pool = self.world.scheduler, pool
        self.device = pool.device = FakeAsyncRunner(self.world.runner)
        self.started: list[tuple[Batch, FakeStep]] = []

    def start(self, batch: Batch | None) -> Batch:
        assert batch is not None
        self.started.append((batch, self.device.start(batch)))
        return batch

    def take(self) -> list[DecodeEffect]:
        batch, step = self.started.pop(0)
        return self.scheduler.commit(batch, step.result(), 0.0)

    def ahead(self) -> list[DecodeEffect]:
        """A turn of the loop that runs ahead."""
        self.start(self.scheduler.schedule_ahead(0.0))
        return self.take()


def request_that_stops(max_tokens: int = 9) -> EngineRequest:
    """Its third token is the first that ends it."""
    stop = StopParams(max_tokens, stop_token_ids=frozenset({1}))
    for seed in range(64):
        request = engine_request("r", [0, 1, 1], stop=stop, seed=seed)
        if len(expected_output(request)) == 3:
            return request
    raise AssertionError("no such seed")


def emitted(effects: list[DecodeEffect]) -> list[int]:
    return [token.token for effect in effects if isinstance(effect, EmitTokens) for token in effect.tokens]


def test_an_end_is_seen_one_step_late_and_the_extra_token_is_dropped():
    one, request = Overlapped(), request_that_stops()
    board(one.world, request)
    one.start(one.scheduler.schedule(0.0))
    got = emitted(one.ahead())
    effects = one.ahead()  # the third token, while a step for the fourth runs
    got += emitted(effects)
    assert [effect.finish for effect in effects if isinstance(effect, EmitTokens)] == [FinishReason.STOP]
    assert got == expected_output(request)[1:]
    assert one.scheduler.num_rows == 0
    assert one.pool.num_owned(Owner.LIVE) > 0, "its pages wait for the step in flight"
    assert one.take() == []
    assert one.scheduler.num_dropped_tokens == 1
    assert_idle(one.world.cache)


def test_a_row_that_ends_by_length_is_not_in_the_step_ahead():
    one, request = Overlapped(), engine_request("r", [0, 1, 1], stop=StopParams(3))
    board(one.world, request)
    one.start(one.scheduler.schedule(0.0))
    one.ahead()
    assert one.scheduler.schedule_ahead(0.0) is None
    one.take()
    assert one.scheduler.num_dropped_tokens == 0
    assert_idle(one.world.cache)


def test_an_attempt_that_comes_again_gets_no_token_of_the_step_in_flight():
    one, request = Overlapped(), engine_request("r", [0, 1, 1], stop=StopParams(5))
    board(one.world, request)
    one.start(one.scheduler.schedule(0.0))
    one.world.import_policy.abort(request.id)
    board(one.world, request)
    batch = one.start(one.scheduler.schedule_ahead(0.0))
    assert [row.future for row in batch.rows] == [None]
    assert emitted(one.take()) == []
    got = emitted(one.take())
    assert got == expected_output(request)[1:2]


def test_pages_of_an_aborted_row_wait_for_the_step_in_flight():
    one, request = Overlapped(), engine_request("r", [0, 1, 1], stop=StopParams(5))
    board(one.world, request)
    one.start(one.scheduler.schedule(0.0))
    assert one.scheduler.abort(request.id)
    assert one.pool.num_owned(Owner.LIVE) == 2
    assert one.take() == []
    assert_idle(one.world.cache)


def test_pages_wait_for_the_newer_of_two_steps_in_flight():
    one, request = Overlapped(), engine_request("r", [0, 1, 1], stop=StopParams(5))
    board(one.world, request)
    one.start(one.scheduler.schedule(0.0))
    one.start(one.scheduler.schedule_ahead(0.0))
    assert one.scheduler.abort(request.id)
    assert one.take() == []
    assert one.pool.num_owned(Owner.LIVE) == 3
    assert one.take() == []
    assert_idle(one.world.cache)


def test_a_page_that_another_row_has_cached_waits_for_the_step_ahead():
    """Two rows with the same tokens fill the same page; the second one's own is freed when both commit."""
    one = Overlapped()
    for name in ("a", "b"):
        board(one.world, engine_request(name, [0, 1, 1], stop=StopParams(6)))
    one.start(one.scheduler.schedule(0.0))
    for _ in range(4):
        one.ahead()
    while one.started:
        one.take()
    assert one.scheduler.num_rows == 0
    assert_idle(one.world.cache)


def test_an_import_joins_the_step_ahead():
    one = Overlapped()
    board(one.world, engine_request("a", [0, 1, 1], stop=StopParams(6)))
    one.start(one.scheduler.schedule(0.0))
    board(one.world, engine_request("b", [0, 0, 1], stop=StopParams(6)))
    batch = one.start(one.scheduler.schedule_ahead(0.0))
    assert [row.future is None for row in batch.rows] == [False, True]
    one.take()
    assert len(emitted(one.take())) == 2


@pytest.mark.parametrize(
    "request_",
    [
        replace(engine_request("r", [0, 1, 1], stop=StopParams(6)), sampling=SamplingParams(presence_penalty=0.5)),
        engine_request("r", [0, 1, 1], stop=StopParams(6, min_tokens=4, stop_token_ids=frozenset({1}))),
    ],
)
def test_a_row_that_needs_the_host_makes_the_turn_run_plainly(request_: EngineRequest):
    one = Overlapped()
    board(one.world, request_)
    one.start(one.scheduler.schedule(0.0))
    assert one.scheduler.schedule_ahead(0.0) is None
    one.take()
    one.start(one.scheduler.schedule(0.0))


def test_a_lack_of_pages_is_left_to_the_plain_scheduler():
    one, request = Overlapped(), engine_request("a", [0, 1, 1], stop=StopParams(9))
    board(one.world, request)
    one.start(one.scheduler.schedule(0.0))
    taken = one.pool.allocate(one.pool.num_free, Hold.PINNED)
    assert taken is not None
    assert one.scheduler.schedule_ahead(0.0) is None
    assert one.pool.num_owned(Owner.LIVE) == 2, "nothing was taken"
    one.pool.drop(taken, Hold.PINNED)
    one.start(one.scheduler.schedule_ahead(0.0))
    assert one.pool.num_owned(Owner.LIVE) == 3


def test_steps_are_committed_in_the_order_of_their_start():
    one = Overlapped()
    board(one.world, engine_request("a", [0, 1, 1], stop=StopParams(9)))
    one.start(one.scheduler.schedule(0.0))
    one.start(one.scheduler.schedule_ahead(0.0))
    (first, _), (second, later) = one.started
    with pytest.raises(Broken, match="order"):
        later.result()
    with pytest.raises(Broken, match="order"):
        one.scheduler.commit(second, one.started[0][1].result(), 0.0)
    with pytest.raises(Broken, match="in flight"):
        one.scheduler.schedule(0.0)
    assert first.rows[0].start + 1 == second.rows[0].start
    assert PAGE_SIZE * len(second.rows[0].pages) > second.rows[0].start
