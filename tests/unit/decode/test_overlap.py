"""A step ahead: what is in it, what drops its tokens, when pages come back, and what makes a turn run plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import Broken, Cancelled
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import PageId, PageKey
from baton.domain.request import EngineRequest, FinishReason, SamplingParams, StopParams
from baton.engine.batch import Batch
from baton.engine.overlap.fake_async_runner import FakeAsyncRunner, FakeStep
from baton.kv.keys import page_keys
from baton.kv.pages import Hold, Owner
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.kv_import import Reserved
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.rows.unsettled_pages import UnsettledRows
from tests.property.overlap.late_digester import GuardedMemory, LateDigester
from tests.property.overlap.overlap_machine import WatchedPool
from tests.tiny_workers import (
    NUM_PAGES,
    PAGE_SIZE,
    assert_idle,
    engine_request,
    expected_output,
    tiny_decode,
    true_digests,
)
from tests.unit.decode.test_scheduler import SOURCE, board


class Overlapped:
    """A tiny decode worker, driven step by step."""

    def __init__(self, token_budget: int = 0, *, digests_beside: bool = False) -> None:
        pool, memory = WatchedPool(NUM_PAGES), GuardedMemory()
        self.world = tiny_decode(
            True, 4, decode_scheduler=OverlapScheduler, token_budget=token_budget, pool=pool, memory=memory
        )
        assert isinstance(self.world.scheduler, OverlapScheduler)
        self.scheduler, self.pool = self.world.scheduler, pool
        self.device = pool.device = FakeAsyncRunner(self.world.runner)
        if digests_beside:
            self.digester = pool.digester = memory.digester = LateDigester(memory)
            self.scheduler.unsettled = UnsettledRows(self.digester)
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


def run_two_alike(one: Overlapped) -> None:
    """Runs two rows with the same tokens to their end, a step ahead."""
    for name in ("a", "b"):
        board(one.world, engine_request(name, [0, 1, 1], stop=StopParams(6)))
    one.start(one.scheduler.schedule(0.0))
    for _ in range(4):
        one.ahead()
    while one.started:
        one.take()


def test_a_page_that_another_row_has_cached_waits_for_the_step_ahead():
    """Two rows with the same tokens fill the same page; the second one's own is freed when both commit."""
    one = Overlapped()
    run_two_alike(one)
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


def one_that_fills_a_page(max_tokens: int) -> tuple[Overlapped, EngineRequest]:
    """A row of 4 tokens, of which one is to be computed. It fills its second page, which is not hashed yet."""
    one, request = Overlapped(digests_beside=True), engine_request("r", [0, 1, 1], stop=StopParams(max_tokens))
    board(one.world, request)
    one.start(one.scheduler.schedule(0.0))
    one.take()
    assert len(one.world.cache) == 1
    assert len(one.digester.pages) == 1
    return one, request


def keys_of(request: EngineRequest) -> list[PageKey]:
    return page_keys([*request.tokens, *expected_output(request)], PAGE_SIZE, "")


def test_pages_of_a_row_that_has_ended_are_cached_with_their_digests():
    one, request = one_that_fills_a_page(max_tokens=2)
    assert one.scheduler.num_rows == 0
    assert one.pool.num_owned(Owner.LIVE) == 2, "neither freed nor cached while they are hashed"
    assert one.scheduler.settle_filled()
    assert one.world.cache.num_matching(keys_of(request)) == 2
    assert not one.scheduler.settle_filled()
    assert_idle(one.world.cache)


def test_pages_of_an_aborted_row_are_cached_with_their_digests():
    one, request = one_that_fills_a_page(max_tokens=9)
    assert one.scheduler.abort(request.id)
    one.scheduler.settle_filled()
    assert one.world.cache.num_matching(keys_of(request)) == 2
    assert_idle(one.world.cache)


@pytest.mark.parametrize("max_tokens", [2, 9])
def test_pages_that_are_condemned_while_they_are_hashed_are_not_cached(max_tokens: int):
    """Prefill takes out what it computed; the page filled here follows it, or is a copy of it."""
    for number in (0, 1):
        one, request = one_that_fills_a_page(max_tokens)
        one.world.import_policy.on_keys_quarantined(SOURCE, [keys_of(request)[number]])
        assert one.scheduler.num_rows == 0
        one.scheduler.settle_filled()
        assert one.world.cache.num_matching(keys_of(request)) == number
        assert_idle(one.world.cache)


def two_rows_without_room(max_tokens: int) -> Overlapped:
    """The first one ends by `max_tokens`. Both need a third page in their second step, and there is none."""
    one = Overlapped(digests_beside=True)
    board(one.world, engine_request("a", [0, 1, 1], stop=StopParams(max_tokens)))
    board(one.world, engine_request("b", [1, 0, 0], stop=StopParams(6)))
    assert one.pool.allocate(one.pool.num_free, Hold.PINNED) is not None
    return one


def test_pages_of_a_row_that_has_ended_come_back_before_one_is_preempted():
    one = two_rows_without_room(max_tokens=2)
    for _ in range(2):
        one.start(one.scheduler.schedule(0.0))
        one.take()
    assert one.scheduler.num_preemptions == 0
    assert one.scheduler.num_running == 1


def test_a_preempted_row_gets_the_pages_of_one_that_has_ended():
    one = two_rows_without_room(max_tokens=6)
    while one.scheduler.num_rows == 2:
        one.start(one.scheduler.schedule(0.0))
        one.take()
    assert one.scheduler.num_preempted == 1
    assert len(one.digester.pages) == 1, "the ended row's last page is not hashed yet"
    one.start(one.scheduler.schedule(0.0))
    assert one.scheduler.num_running == 1


def test_a_page_is_not_cached_twice_while_it_is_hashed():
    """Two rows with the same tokens fill the same page in one step; the step ahead reads the copy that gives way."""
    one = Overlapped(digests_beside=True)
    run_two_alike(one)
    one.scheduler.settle_filled()
    assert one.scheduler.num_rows == 0
    assert len(one.world.cache) == 4
    assert_idle(one.world.cache)


def row_beside_its_cached_pages(digests_beside: bool) -> tuple[Overlapped, EngineRequest, list[PageId]]:
    """A row whose next page is cached elsewhere, an import that holds all other pages but those of the step ahead.

    And the pages that are pinned, so that no others are left.
    """
    one = Overlapped(digests_beside=digests_beside)
    board(one.world, engine_request("a", [0, 1, 1], stop=StopParams(6)))
    one.start(one.scheduler.schedule(0.0))
    while one.started:
        batch = one.scheduler.schedule_ahead(0.0)
        if batch is not None:
            one.start(batch)
        one.take()
    one.scheduler.settle_filled()
    assert one.scheduler.num_rows == 0
    assert len(one.world.cache) == 4
    board(one.world, engine_request("b", [0, 1, 1], stop=StopParams(6)))
    one.start(one.scheduler.schedule(0.0))
    if digests_beside:
        one.ahead()  # page 2 is filled and waits for its digest
    coming = engine_request("c", [0, 0, 0, 0, 0], stop=StopParams(4))
    num_next = 0 if digests_beside else 1  # pages that the step ahead takes
    pinned = one.pool.allocate(one.pool.num_free, Hold.PINNED)
    assert pinned is not None
    while one.world.imports.num_reservable_pages < 3 + num_next:
        one.pool.drop([pinned.pop()], Hold.PINNED)
    answer, _ = one.world.import_policy.reserve(coming.id, 5, [], 0.0, 10.0)
    assert isinstance(answer, Reserved)
    one.world.import_policy.claim(answer.id, coming, SOURCE, 9.0)
    return one, coming, pinned


@pytest.mark.parametrize("digests_beside", [False, True])
def test_a_page_that_gives_way_leaves_reserved_pages_available(digests_beside: bool):
    """Its cached copy can be evicted no more, and itself is not free before the step ahead has read it."""
    one, coming, _ = row_beside_its_cached_pages(digests_beside)
    one.start(one.scheduler.schedule_ahead(0.0))
    assert one.world.imports.num_reservable_pages == 0
    one.take()
    pages = tuple(PageId(number) for number in range(3))
    chunk = PublishedChunk(coming.id, 0, pages, true_digests(coming.tokens, 0, 3))
    assert one.world.import_policy.on_chunk(chunk, 0.0)


def test_a_row_that_ends_gives_back_pages_that_could_not_give_way():
    one, coming, pinned = row_beside_its_cached_pages(digests_beside=True)
    one.start(one.scheduler.schedule_ahead(0.0))
    assert one.scheduler.abort(engine_request("b", [0]).id)
    while one.started:
        one.take()
    one.scheduler.settle_filled()
    one.world.import_policy.fail(coming.id, Cancelled("over"))
    one.pool.drop(pinned, Hold.PINNED)
    assert_idle(one.world.cache)
