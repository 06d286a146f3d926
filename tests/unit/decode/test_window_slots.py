"""Imports and rows of a decode worker whose pages' window parts have slots of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import Broken, LinkBroken
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId
from baton.domain.request import StopParams
from baton.engine.overlap.page_fence import PageFence
from baton.kv.geometry import PageWindow
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold
from baton.kv.windows.slots import NO_SLOT, WindowSlots
from baton.services.decode.effects import EmitTokens
from baton.services.decode.kv_import import Busy, ProofKind, Reserved
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.scheduler import DecodeScheduler
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import PAGE_SIZE, assert_idle, engine_request, expected_output, tiny_decode
from tests.unit.decode.test_import_table import ID, KEYS, REQUEST, SOURCE, ImportDriver
from tests.unit.decode.test_local_chunks import run, take

WINDOW = PageWindow(3, PAGE_SIZE, 1)
"""Behind 7 tokens the next one reads keys 5 and 6: pages from the third on. A row needs up to 3 slots at once."""
ROW_SLOTS = WINDOW.most_pages(2)


class SlotDriver(ImportDriver):
    """An import table over a pool with `num_slots` window slots."""

    def __init__(self, num_slots: int = 8) -> None:
        super().__init__(max_window_pages=4)
        self.cache.window = WINDOW
        self.slots: WindowSlots = self.cache.pool.add_window_slots(num_slots, 2)
        self.imports.limits = replace(self.imports.limits, window=WINDOW)

    def publish(self, window_slots: tuple[int, ...]) -> list[Pull]:
        pages = tuple(PageId(100 + i) for i in range(4))
        chunk = PublishedChunk(ID, 0, pages, (7,) * 4, window_slots=window_slots)
        return self.imports.on_chunk(chunk, now=1.0)

    def land(self, pull: Pull) -> list[Pull]:
        found = () if pull.num_parts is None else tuple(1000 + page for page in pull.local_pages)
        return self.imports.on_pull_event(PullEvent(pull, PullOutcome.DONE, 64, 0.1, "", (), found), 2.0)

    def import_all(self, window_slots: tuple[int, ...] = (-1, -1, 30, 31)) -> None:
        pulls = self.publish(window_slots)
        while pulls:
            pulls += self.land(pulls.pop())


def test_pages_before_the_window_get_no_slot():
    driver = SlotDriver()
    driver.claim()
    leading, *rest = driver.publish((-1, -1, 30, 31))
    rest += driver.land(leading)
    assert [(list(one.remote_pages), one.num_parts, list(one.remote_windows)) for one in (leading, *rest)] == [
        ([100, 101], 1, [-1, -1]),
        ([102, 103], None, [30, 31]),
    ]
    kv_import = driver.imports.get(ID)
    assert kv_import is not None
    assert [slot != NO_SLOT for slot in driver.slots.slots(kv_import.table.pages)] == [False, False, True, True]
    assert driver.slots.num_held == 2


def test_a_source_without_slots_names_none():
    driver = SlotDriver()
    driver.claim()
    leading, *rest = driver.publish(())
    rest += driver.land(leading)
    assert [(one.num_parts, list(one.remote_windows)) for one in (leading, *rest)] == [(1, []), (None, [])]


@pytest.mark.parametrize(
    ("window_slots", "why"), [((-1, -1, 30), "3 window slots"), ((-1, -1, -1, 31), "were not published")]
)
def test_a_chunk_without_the_window_parts_that_are_read_is_refused(window_slots: tuple[int, ...], why: str):
    driver = SlotDriver()
    driver.claim()
    with pytest.raises(LinkBroken, match=why):
        driver.publish(window_slots)


def test_rows_are_reserved_as_long_as_their_slots_can_be_reserved():
    driver = SlotDriver(2 * ROW_SLOTS)
    others = [engine_request(name, [0, 1, 0, 1, 1]) for name in ("a", "b", "c")]
    replies = [driver.imports.reserve(one.id, 5, [], 0, 0.0, 5.0) for one in others]
    assert [type(reply) for reply in replies] == [Reserved, Reserved, Busy]
    driver.imports.abort(others[0].id)
    assert isinstance(driver.imports.reserve(others[2].id, 5, [], 0, 0.0, 5.0), Reserved)
    assert driver.slots.num_unreserved == 0


def test_an_aborted_import_keeps_its_slots_until_its_reads_have_ended():
    driver = SlotDriver()
    driver.claim()
    pulls = driver.publish((-1, -1, 30, 31))
    driver.imports.abort(ID)
    assert driver.slots.num_held == 2, "a read may still write there"
    for pull in pulls:
        driver.imports.on_pull_event(PullEvent(pull, PullOutcome.FAILED, 0, 0.1), 2.0)
    assert_idle(driver.cache)


def imported(num_slots: int = 8) -> SlotDriver:
    """An import that has ended; its row has ended as well."""
    driver = SlotDriver(num_slots)
    driver.claim()
    driver.import_all()
    driver.seal()
    driver.imports.commit(ID, ProofKind.DIGESTS, 4.0).table.release()
    assert (len(driver.cache), driver.slots.num_unheld) == (3, 1)
    return driver


def test_a_prompt_that_is_computed_here_holds_what_its_own_windows_reach():
    """It was reserved for an import, which reads keys from 7 on. Computed behind 6 tokens it reads 4 and 5."""
    driver = imported(ROW_SLOTS)
    request = engine_request("r", [*REQUEST.tokens, 1, 0], attempt=2)
    reserved = driver.imports.reserve(request.id, 9, KEYS, 0, 5.0, 5.0)
    assert isinstance(reserved, Reserved)
    assert (reserved.prefix_len, driver.slots.num_held) == (6, 0)
    prompt = driver.imports.claim_local(reserved.id, request)
    assert prompt is not None
    assert driver.slots.num_held == 1
    others = driver.cache.allocate(3, Hold.LIVE)
    assert others is not None
    assert not driver.slots.take(others), "it would take all slots"
    prompt.table.cover_windows(6, 8)
    driver.cache.pool.drop(others, Hold.LIVE)
    prompt.table.release()
    assert_idle(driver.cache)


def test_a_prompt_is_not_computed_behind_window_parts_that_were_evicted():
    driver = imported(ROW_SLOTS)
    request = engine_request("r", [*REQUEST.tokens, 1, 0], attempt=2)
    reserved = driver.imports.reserve(request.id, 9, KEYS, 0, 5.0, 5.0)
    assert isinstance(reserved, Reserved)
    others = driver.cache.allocate(3, Hold.LIVE)
    assert others is not None
    assert driver.slots.take(others)
    assert driver.imports.claim_local(reserved.id, request) is None
    assert driver.imports.claim(reserved.id, request, SOURCE, 9.0), "it is still good for an import"


def test_the_next_attempt_finds_what_is_left():
    driver = imported()
    again = AttemptId(ID.request_id, 2)
    reserved = driver.imports.reserve(again, 7, KEYS, 0, 5.0, 5.0, computes_prompt=True)
    assert isinstance(reserved, Reserved)
    assert reserved.prefix_len == 6


def test_a_reservation_to_compute_here_may_be_claimed_for_an_import():
    """Its match reaches farther back than the import needs, beyond what was reserved."""
    driver = imported(12)
    request = engine_request("r", [*REQUEST.tokens, 1, 0, 1, 1, 0, 1, 1], attempt=2)
    num_tokens = len(request.tokens)
    reserved = driver.imports.reserve(request.id, num_tokens, KEYS, 0, 5.0, 5.0, computes_prompt=True)
    assert isinstance(reserved, Reserved)
    assert (reserved.prefix_len, driver.slots.num_held) == (6, 1)
    assert driver.imports.claim(reserved.id, request, SOURCE, 9.0)
    pages = tuple(PageId(100 + i) for i in range(num_tokens // PAGE_SIZE))
    chunk = PublishedChunk(request.id, 0, pages, (7,) * len(pages), window_slots=(-1,) * 5 + (30, 31))
    driver.imports.on_chunk(chunk, now=6.0)
    kv_import = driver.imports.get(request.id)
    assert kv_import is not None
    held = [slot != NO_SLOT for slot in driver.slots.slots(kv_import.table.pages)]
    assert held == [False, False, True, False, False, False, True, True], "page 2 is cached with its own"
    assert driver.slots.num_held == 2


def test_a_claim_for_an_import_gives_back_the_slots_of_chunks():
    driver = SlotDriver(num_slots=40)
    driver.imports.limits = replace(driver.imports.limits, max_chunk_tokens=40)
    reserved = driver.imports.reserve(ID, len(REQUEST.tokens), KEYS, 0, 0.0, 5.0, True)
    assert isinstance(reserved, Reserved)
    assert driver.slots.num_unreserved < 40 - ROW_SLOTS
    assert driver.imports.claim(reserved.id, REQUEST, SOURCE, 9.0)
    driver.import_all()
    assert driver.slots.num_unreserved == 40 - ROW_SLOTS


def test_a_short_row_reserves_no_more_slots_than_it_has_pages():
    driver = SlotDriver(2 * ROW_SLOTS)
    short = [engine_request(name, [0, 1]) for name in ("a", "b", "c", "d")]
    replies = [driver.imports.reserve(one.id, 2, [], 0, 0.0, 5.0) for one in short]
    assert [type(reply) for reply in replies] == [Reserved, Reserved, Reserved, Busy], "two slots for 4 tokens each"
    assert driver.slots.num_unreserved == 0


@pytest.mark.parametrize("scheduler", [DecodeScheduler, OverlapScheduler])
def test_rows_that_outgrow_the_slots_take_turns(scheduler: type[DecodeScheduler]):
    """Two slots each are enough at first; with three each one row has to wait for the other."""
    num_slots = 4 if scheduler is DecodeScheduler else 8  # a step ahead may need two more each
    world = tiny_decode(True, 8, decode_scheduler=scheduler, token_budget=4, num_window_slots=num_slots)
    requests = [engine_request(name, [0, 1], stop=StopParams(max_tokens=7)) for name in ("old", "new")]
    for request in requests:
        take(world, request)
    _, effects = run(world)
    assert world.scheduler.num_preemptions > 0
    for request in requests:
        emitted = [effect for effect in effects if isinstance(effect, EmitTokens) and effect.id == request.id]
        assert [token.token for effect in emitted for token in effect.tokens] == expected_output(request)
    assert_idle(world.cache)
    windows = world.cache.pool.windows
    assert windows is not None
    assert windows.num_unreserved == num_slots


def test_a_preempted_row_leaves_a_slot_to_each_that_runs():
    """Otherwise the next one that grows would preempt it again."""
    driver = SlotDriver(ROW_SLOTS + 1)
    table = PageTable(driver.cache, PAGE_SIZE, "", Hold.LIVE)
    assert not table.reserve_windows(2, num_spare=2)
    assert driver.slots.num_unreserved == ROW_SLOTS + 1, "without a change"
    assert table.reserve_windows(2, num_spare=1)
    assert driver.slots.num_unreserved == 1


def test_pages_of_a_row_that_came_back_wait_for_slots_before_they_give_way():
    """Its earlier pages are cached and have slots: with its own, which a step in flight reads, they are too many."""
    driver, tokens = SlotDriver(7), [0, 1, 1, 0, 1, 0]
    driver.cache.window = PageWindow(7, PAGE_SIZE, 1)
    before, again, other = (PageTable(driver.cache, PAGE_SIZE, "", Hold.LIVE) for _ in range(3))
    for number, table in enumerate((before, again)):
        assert table.reserve_windows(2, end=6)
        assert table.extend(6)
        table.cover_windows(5, 6)
        table.settle((1, 2, 3))
        if number == 0:
            table.cache_full_pages(tokens, 6)
            table.release()
    assert other.reserve_windows(2, end=8)
    assert other.extend(4)
    fence = PageFence(driver.cache.pool)
    fence.on_started()
    assert not fence.has_slots(again, 3)
    with fence.replacement(again, 3):
        again.cache_full_pages(tokens, 6)
    with pytest.raises(Broken, match="no window slots"):  # what the scheduler would run into
        other.cover_windows(3, 4)
