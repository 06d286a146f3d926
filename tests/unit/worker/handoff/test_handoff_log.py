"""The handoff log: an early, a concurrent and a late watcher each get every event once."""

from __future__ import annotations

import asyncio

import pytest

from baton.domain.errors import BatonError, Cancelled, DeadlineExceeded, LeaseEnded
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import SampledToken
from baton.domain.timing.attempt_times import PrefillTimes
from baton.engine.handoff.export_events import Seal
from baton.worker.handoff.handoff_log import HandoffEvent, HandoffLog

ID = AttemptId(RequestId("r"), 1)
CHUNKS = [PublishedChunk(ID, page, (PageId(page),), (page,)) for page in range(3)]
SEAL = Seal(ID, 0, SampledToken(1), None, 3, PrefillTimes(0, 0, 0, (), 5, 0))


async def all_of(log: HandoffLog, timeout_s: float = 10.0) -> list[HandoffEvent]:
    return [event async for event in log.watch(ID, timeout_s)]


def append(log: HandoffLog, *events: HandoffEvent) -> None:
    for event in events:
        log.append(ID, event)


async def test_a_late_watcher_gets_every_event():
    log = HandoffLog()
    append(log, *CHUNKS, SEAL)
    assert await all_of(log) == [*CHUNKS, SEAL]
    assert await all_of(log) == [*CHUNKS, SEAL]


async def test_an_early_watcher_gets_every_event():
    log = HandoffLog()

    async def announce() -> None:
        assert len(log) == 1, "the watcher is not there yet"
        append(log, *CHUNKS, SEAL)

    heard, _ = await asyncio.gather(all_of(log), announce())
    assert heard == [*CHUNKS, SEAL]


async def test_a_watcher_in_the_middle_and_a_burst():
    log = HandoffLog()
    append(log, CHUNKS[0])
    watching = log.watch(ID, 10.0)
    assert await anext(watching) == CHUNKS[0]
    append(log, CHUNKS[1], CHUNKS[2], SEAL)
    assert [event async for event in watching] == [CHUNKS[1], CHUNKS[2], SEAL]


@pytest.mark.parametrize(("error", "expected"), [(None, Cancelled), (LeaseEnded("late"), LeaseEnded)])
async def test_watchers_get_the_end_of_an_export(error: BatonError | None, expected: type[BatonError]):
    log = HandoffLog()
    append(log, CHUNKS[0])

    async def end() -> None:
        log.end(ID, error)

    (first, last), _ = await asyncio.gather(all_of(log), end())
    assert first == CHUNKS[0]
    assert isinstance(last, expected)
    assert len(log) == 0


async def test_a_seal_is_the_last_event():
    log = HandoffLog()
    append(log, CHUNKS[0])
    watching = log.watch(ID, 10.0)
    assert await anext(watching) == CHUNKS[0]
    append(log, SEAL)
    log.end(ID)
    assert [event async for event in watching] == [SEAL]
    assert len(log) == 0


async def test_silence_has_a_deadline_and_leaves_nothing_behind():
    log = HandoffLog()
    (event,) = await all_of(log, timeout_s=0.01)
    assert isinstance(event, DeadlineExceeded)
    assert len(log) == 0


async def test_a_watcher_that_leaves_early_leaves_nothing_behind():
    log = HandoffLog()
    watching = asyncio.create_task(all_of(log))

    async def leave() -> None:
        assert len(log) == 1
        watching.cancel()

    _, ended = await asyncio.gather(leave(), watching, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
    assert len(log) == 0


async def test_published_events_outlive_their_watcher():
    log = HandoffLog()
    append(log, CHUNKS[0])
    watching = log.watch(ID, 10.0)
    assert await anext(watching) == CHUNKS[0]
    await watching.aclose()
    append(log, SEAL)
    assert await all_of(log) == [CHUNKS[0], SEAL]


def test_the_end_of_an_unknown_export_is_ignored():
    log = HandoffLog()
    log.end(ID)
    assert len(log) == 0
