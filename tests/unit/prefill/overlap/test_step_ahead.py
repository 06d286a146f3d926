"""Prefill with a step in flight: where the next chunk begins, what is dropped, and when pages come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import Broken, ConstraintFailed
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import PageId
from baton.engine.batch import Batch
from baton.engine.handoff.export_events import Seal
from baton.engine.messages import Fail
from baton.engine.overlap.fake_async_runner import FakeAsyncRunner, FakeStep
from baton.kv.pages import Owner
from baton.services.prefill.overlap.scheduler import OverlapPrefillScheduler
from baton.services.prefill.policy import PolicySettings
from baton.services.prefill.scheduler import PrefillEffect
from tests.property.overlap.late_digester import GuardedMemory
from tests.property.overlap.overlap_machine import WatchedPool
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, assert_idle, engine_request, tiny_prefill

LONG = [1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1]  # 6 pages
SHORT = [0, 1, 1, 0]


class Overlapped:
    """A tiny prefill worker, driven step by step."""

    def __init__(
        self, token_budget: int = 2 * PAGE_SIZE, *, prefix_sharing: bool = True, num_window_slots: int | None = None
    ) -> None:
        memory, self.pool = GuardedMemory() if num_window_slots is None else None, WatchedPool(NUM_PAGES)
        order = PolicySettings(prefix_sharing=prefix_sharing)
        self.world = tiny_prefill(
            9.0, token_budget, NUM_PAGES, prefill_scheduler=OverlapPrefillScheduler, order=order,
            memory=memory, pool=self.pool, num_window_slots=num_window_slots,
        )  # fmt: skip
        assert isinstance(self.world.scheduler, OverlapPrefillScheduler)
        self.scheduler = self.world.scheduler
        self.device = self.pool.device = FakeAsyncRunner(self.world.runner)
        if memory is not None:
            memory.device = self.device
        self.started: list[tuple[Batch, FakeStep]] = []

    def add(self, name: str, prompt: list[int]) -> None:
        self.scheduler.add(engine_request(name, prompt), 0, 9.0)

    def start(self) -> list[tuple[str, int, int]]:
        """Starts a step; its rows' requests and positions."""
        batch = self.scheduler.schedule(0.0)
        if batch is None:
            return []
        self.started.append((batch, self.device.start(batch)))
        self.scheduler.on_started(batch)
        return [(row.id.request_id, row.start, row.start + len(row.tokens)) for row in batch.rows]

    def take(self) -> list[PrefillEffect]:
        batch, step = self.started.pop(0)
        return self.scheduler.commit(batch, step.result(), 0.0)


def published(effects: list[PrefillEffect]) -> list[tuple[int, int]]:
    return [(one.first_page, len(one.pages)) for one in effects if isinstance(one, PublishedChunk)]


def test_the_next_chunk_begins_behind_the_one_in_flight():
    one = Overlapped()
    one.add("r", LONG)
    assert one.start() == [("r", 0, 4)]
    assert one.start() == [("r", 4, 8)]
    assert published(one.take()) == [(0, 2)], "a step in flight publishes nothing"
    assert one.start() == [("r", 8, 11)]
    assert published(one.take()) == [(2, 2)]
    assert one.start() == [], "all of it is in flight"
    effects = one.take()
    assert published(effects) == [(4, 2)]
    assert isinstance(effects[-1], Seal)


def test_a_prompt_that_ends_in_flight_leaves_its_share():
    one = Overlapped()
    one.add("a", SHORT)
    one.add("b", LONG)
    assert one.start() == [("a", 0, 4)]
    assert one.start() == [("b", 0, 4)], "b is the oldest with tokens left"


def test_a_prompt_waits_for_shared_pages_of_a_step_in_flight():
    one = Overlapped()
    one.add("a", [*SHORT, 1])
    one.add("b", [*SHORT, 0])
    assert one.start() == [("a", 0, 4)]
    assert one.start() == [("a", 4, 5)]
    one.take()
    assert one.start() == [("b", 4, 5)], "its prefix is cached now"


def test_pages_of_an_aborted_prompt_wait_for_steps_in_flight():
    one = Overlapped()
    one.add("r", LONG)
    one.start()
    one.start()
    assert one.scheduler.abort(engine_request("r", LONG).id)
    assert one.pool.num_owned(Owner.LIVE) == 6
    assert one.take() == []
    assert one.pool.num_owned(Owner.LIVE) == 6, "the newer step writes them, too"
    assert one.take() == []
    assert_idle(one.world.cache)
    assert one.pool.num_free == NUM_PAGES, "nothing of it is cached"


def test_a_page_that_another_prompt_has_cached_waits_for_the_step_ahead():
    """Both compute the same first pages at once; the second one's own are read by its next chunk."""
    one = Overlapped(4 * PAGE_SIZE, prefix_sharing=False)
    one.add("a", [0, 1, 1, 0, 1])
    one.add("b", [0, 1, 1, 0, 0])
    assert one.start() == [("a", 0, 5), ("b", 0, 2)]
    assert one.start() == [("b", 2, 5)]
    one.take()
    assert one.scheduler.fence.num_pages == 1, "b's own first page"
    effects = one.take()
    assert isinstance(effects[-1], Seal)
    assert one.scheduler.fence.num_pages == 0


def test_the_slot_of_a_page_that_gave_way_waits_for_the_step_ahead():
    """The page loses its slot to the cached one; the next chunk reads it by its number."""
    one = Overlapped(4 * PAGE_SIZE, prefix_sharing=False, num_window_slots=8)
    windows = one.pool.windows
    assert windows is not None
    one.add("a", [0, 1, 1, 0, 1])
    one.add("b", [0, 1, 1, 0, 0])
    one.start()
    one.start()
    read = windows.slots(one.started[1][0].rows[0].pages)
    one.take()
    assert one.scheduler.fence.num_pages == 1
    assert not set(read) & set(windows.free_slots)
    one.take()
    assert one.scheduler.fence.num_pages == 0
    assert set(read) & set(windows.free_slots)


def test_a_prompt_that_starts_again_gets_nothing_of_earlier_steps():
    one = Overlapped()
    one.add("a", SHORT)
    one.start()
    one.take()
    assert one.world.exports.commit(engine_request("a", SHORT).id)
    one.add("b", [*SHORT, 1, 0, 1])
    assert one.start() == [("b", 4, 7)]
    prompt = one.scheduler._queue.chunking[0]
    first = one.world.cache.page_of(prompt.keys[0])
    assert one.scheduler.on_wrong_pages([first], 0.0) == []
    assert one.scheduler.num_waiting == 1
    assert one.start() == [("b", 0, 4)]
    assert one.take() == [], "its first step counts no more"
    assert one.start() == [("b", 4, 7)]
    assert published(one.take()) == [(0, 2)]
    assert isinstance(one.take()[-1], Seal)


def test_rows_that_are_taken_out_before_the_start_are_in_no_step():
    one = Overlapped()
    one.add("a", [1])
    one.add("b", [0, 0])
    batch = one.scheduler.schedule(0.0)
    assert batch is not None
    assert [row.id.request_id for row in batch.rows] == ["a", "b"]
    assert one.scheduler.abort(batch.rows[0].id)
    rest = Batch(batch.rows[1:])
    step = one.device.start(rest)
    one.scheduler.on_started(rest)
    effects = one.scheduler.commit(rest, step.result(), 0.0)
    assert [effect.id.request_id for effect in effects if isinstance(effect, Seal)] == ["b"]


def test_a_prompt_that_fails_in_its_last_step_ends_and_others_go_on():
    one = Overlapped(3 * PAGE_SIZE)
    one.add("a", SHORT)
    one.add("b", LONG)
    assert one.start() == [("a", 0, 4), ("b", 0, 2)]
    assert one.start() == [("b", 2, 8)]
    batch, step = one.started.pop(0)
    output = replace(step.result(), failures={0: ConstraintFailed("no token is allowed")})
    effects = one.scheduler.commit(batch, output, 0.0)
    assert [effect.id.request_id for effect in effects if isinstance(effect, Fail)] == ["a"]
    one.start()
    one.take()
    assert isinstance(one.take()[-1], Seal)
    assert one.scheduler.fence.num_pages == 0


def test_steps_are_committed_in_the_order_of_their_start():
    one = Overlapped()
    one.add("r", LONG)
    one.start()
    one.start()
    with pytest.raises(Broken, match="order"):
        one.started[1][1].result()
    with pytest.raises(Broken, match="order"):
        one.scheduler.commit(one.started[1][0], one.started[0][1].result(), 0.0)


def test_the_guard_notices_a_page_that_is_read_too_early():
    one = Overlapped()
    one.add("r", LONG)
    one.start()
    hasher = one.world.cache.hasher
    assert hasher is not None
    with pytest.raises(Broken, match="before the step"):
        hasher.digests([PageId(one.started[0][0].rows[0].pages[0])])
