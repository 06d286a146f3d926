"""Rows that are sent back: which ones, and what is kept for their next attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.domain.errors import BatonError, SentBack
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId
from baton.domain.request import StopParams
from baton.engine.handoff.cached_exports import CachedExports, ExportLimits
from baton.engine.handoff.export_commands import CommitExport, OpenExport
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.messages import Fail
from baton.kv.geometry import PageWindow
from baton.kv.keys import page_keys
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Owner
from baton.services.decode.page_exports import PageExports
from baton.services.decode.rows.order import RowOrder
from baton.services.decode.rows.send_back import KEEP_S
from tests.tiny_workers import (
    PAGE_SIZE,
    TinyDecode,
    assert_idle,
    check_invariants,
    engine_request,
    expected_output,
    tiny_decode,
)
from tests.unit.decode.test_row_order import FakeRow
from tests.unit.decode.test_scheduler import board, run_to_the_end, tokens_of

STOP = StopParams(max_tokens=9)
OLD = engine_request("old", [0, 1, 1, 0, 1, 0, 1], stop=STOP)
MIDDLE = engine_request("middle", [1, 1, 0, 1, 1], stop=STOP)
NEW = engine_request("new", [1], stop=STOP)


@dataclass
class Answer:
    """Stands for a `Reply`, whose other end is a gRPC call."""

    values: list[Any] = field(default_factory=list)

    def send(self, value: Any) -> None:
        self.values.append(value)


class Giver:
    """A worker that has sent MIDDLE back after two steps, while NEW waits in host memory and OLD runs on.

    MIDDLE leaves three full pages, which nothing else holds. NEW needs two of them to come back.
    """

    def __init__(self, windowless: int | None = None) -> None:
        """`windowless`: number of a page of MIDDLE that has no window part."""
        self.world = world = tiny_decode(digests=True, num_host_pages=1)
        for request in (OLD, MIDDLE, NEW):
            board(world, request)
        if windowless is not None:
            world.cache.window = PageWindow(2, PAGE_SIZE, 1)
            page = world.scheduler._imported[1].table.pages[windowless]
            world.cache.pool.digests.mark_windowless([page])
        self.effects = self.step() + self.step()
        self.table = ExportTable(world.cache.pool, 5.0)
        limits = ExportLimits(1, world.import_policy.num_free_pages)
        cached = CachedExports(world.cache, self.table, PageChecks(world.cache), limits)
        self.exports = PageExports(self.table, cached, world.import_policy)

    def step(self, now: float = 0.0) -> list[Any]:
        return one_step(self.world, now)

    def open(self, id: AttemptId, now: float = 0.0) -> PublishedChunk | BatonError:
        answer = Answer()
        keys = tuple(page_keys([*MIDDLE.tokens, *expected_output(MIDDLE)][: 3 * PAGE_SIZE], PAGE_SIZE, ""))
        assert self.exports.handle(OpenExport(id, keys, 0, answer), now) == []  # type: ignore[arg-type]
        (value,) = answer.values
        return value

    def commit(self, id: AttemptId) -> bool:
        answer = Answer()
        self.exports.handle(CommitExport(id, answer), 0.0)  # type: ignore[arg-type]
        return answer.values == [True]


def one_step(world: TinyDecode, now: float = 0.0) -> list[Any]:
    batch = world.scheduler.schedule(now)
    assert batch is not None
    effects = world.scheduler.commit(batch, world.runner.run(batch), now)
    check_invariants(world.cache)
    return effects


def test_the_next_attempt_gets_the_pages_that_a_row_has_left():
    giver, next_id = Giver(), MIDDLE.id.next()
    (failure,) = [effect for effect in giver.effects if isinstance(effect, Fail)]
    assert (failure.id, type(failure.error)) == (MIDDLE.id, SentBack)
    other = giver.open(engine_request("another", [1]).id)
    assert isinstance(other, PublishedChunk)
    assert other.pages == (), "while a row waits in host memory, nothing is given"
    chunk = giver.open(next_id)
    assert isinstance(chunk, PublishedChunk)
    assert len(chunk.pages) == 2, "all but the one that the next step of OLD may need, beyond the usual bound of one"
    assert giver.world.scheduler.sent_back.num_given == 1
    giver.step()
    assert giver.world.scheduler.num_preempted == 1, "pinned pages are not there for NEW"
    assert giver.commit(next_id)
    giver.effects += giver.step() + run_to_the_end(giver.world)
    assert giver.world.scheduler.num_preempted == 0


def test_pages_that_nobody_asks_for_are_forgotten_at_the_next_row():
    """Also where no row ever waits in host memory."""
    giver = Giver()
    giver.world.scheduler.sent_back.keep(giver.world.scheduler._running[0], 10.0 * KEEP_S)
    assert not giver.world.scheduler.sent_back.is_next_attempt(MIDDLE.id.next(), 0.0)


def test_a_preempted_row_waits_for_the_next_attempt_to_ask():
    giver = Giver()
    assert giver.world.scheduler.sent_back.num_pages(0.0) == 3
    giver.step()
    assert giver.world.scheduler.num_preempted == 1, "it would come back into the pages"


@pytest.mark.parametrize(("windowless", "num_kept"), [(0, 0), (1, 1), (2, 2)])
def test_nothing_is_kept_from_the_first_page_on_that_no_export_gives(windowless: int, num_kept: int):
    giver = Giver(windowless)
    assert giver.world.scheduler.sent_back.num_pages(0.0) == num_kept
    assert giver.world.scheduler.sent_back.is_next_attempt(MIDDLE.id.next(), 0.0) == (num_kept > 0)
    if not num_kept:
        giver.step()
        assert giver.world.scheduler.num_preempted == 0, "NEW waits for nobody"


@pytest.mark.parametrize("why", ["late", "given and ended"])
def test_a_preempted_row_comes_back_once_nobody_asks_any_more(why: str):
    giver = Giver()
    if why != "late":
        giver.open(MIDDLE.id.next())
        giver.exports.expire(5.0)
    giver.step(KEEP_S if why == "late" else KEEP_S / 2)
    assert giver.world.scheduler.num_preempted == 0
    if why == "late":
        late = giver.open(MIDDLE.id.next(), KEEP_S)
        assert isinstance(late, PublishedChunk)
        assert len(late.pages) <= 1, "it is an export like others by now"


def test_a_row_that_grows_takes_kept_pages():
    giver = Giver()
    effects = giver.effects
    while giver.world.scheduler.num_running:
        effects += giver.step()
    assert tokens_of(effects, OLD) == expected_output(OLD)[1:]
    assert giver.world.scheduler.sent_back.num_pages(0.0) == 0
    assert sum(giver.world.scheduler.num_send_backs.values()) == 1
    effects += run_to_the_end(giver.world)
    assert tokens_of(effects, NEW) == expected_output(NEW)[1:]
    assert_idle(giver.world.cache)


def test_a_row_that_came_back_leaves_its_pages_as_well():
    """Its pages are not in the prefix cache until it fills the next one."""
    world = tiny_decode(digests=True, num_host_pages=4)
    board(world, OLD)
    board(world, MIDDLE)
    while not world.scheduler.num_preempted:
        one_step(world)
    world.scheduler.abort(OLD.id)
    assert world.scheduler.schedule(0.0) is not None
    (row,) = world.scheduler._running
    assert not row.table.cached_keys
    world.scheduler.sent_back.keep(row, 0.0)
    num_full = row.num_filled // PAGE_SIZE
    assert len(row.table.cached_keys) == num_full == world.scheduler.sent_back.num_pages(0.0)
    assert all(map(world.cache.pool.digests.is_settled, row.table.pages[:num_full]))


def test_a_row_without_room_in_host_memory_is_spared_for_one_that_has():
    world = tiny_decode(digests=True, num_host_pages=1)
    small = engine_request("small", [1], stop=STOP)
    big = engine_request("big", [1, 1, 0, 1], stop=STOP)
    for request in (OLD, small, big):
        board(world, request)
    effects = one_step(world) + one_step(world)
    assert not [effect for effect in effects if isinstance(effect, Fail)]
    assert not any(world.scheduler.num_send_backs.values())
    assert [row.request for row in world.scheduler._preempted] == [small]
    assert world.cache.pool.num_owned(Owner.LIVE) == 8


def test_the_oldest_row_and_higher_levels_never_step_in():
    rows = [FakeRow(0), FakeRow(1, level=2.0), FakeRow(2)]

    def fits(row: FakeRow) -> bool:
        return row is not rows[2]

    assert RowOrder().victim(rows, fits) is rows[1]
    assert RowOrder(by_priority=True).victim(rows, fits) is rows[2], "the oldest is spared, and so is a higher level"
    assert RowOrder().victim(rows[::2], fits) is rows[2]
