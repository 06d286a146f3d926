"""The handoff log: an early, a concurrent and a late watcher each get every event once; after the end, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.domain.errors import BatonError, Cancelled, DeadlineExceeded, LeaseEnded, WorkerLost
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import SampledToken
from baton.domain.timing.attempt_times import PrefillTimes
from baton.engine.handoff.export_events import Seal
from baton.worker.handoff import handoff_log
from baton.worker.handoff.handoff_ends import HandoffEnds
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


async def test_the_end_of_an_unknown_export_is_ignored():
    log = HandoffLog()
    log.end(ID)
    assert len(log) == 0


@pytest.mark.parametrize("events", [(), (CHUNKS[0],), (*CHUNKS, SEAL)])
@pytest.mark.parametrize(("error", "expected"), [(None, Cancelled), (LeaseEnded("late"), LeaseEnded)])
async def test_who_watches_an_ended_export_gets_its_end(
    events: tuple[HandoffEvent, ...], error: BatonError | None, expected: type[BatonError]
):
    """A reservation or a link was slower than the lease. Without the end, the watcher waits for its deadline."""
    log = HandoffLog()
    append(log, *events)
    log.end(ID, error)
    for _ in range(2):
        (end,) = await all_of(log)
        assert type(end) is expected
    assert len(log) == 0


async def test_the_end_of_a_failed_handoff_is_its_failure():
    log = HandoffLog()
    append(log, CHUNKS[0], WorkerLost("a"))
    log.end(ID)
    log.end(ID, LeaseEnded("b"))
    (end,) = await all_of(log)
    assert type(end) is WorkerLost


async def test_a_remembered_end_keeps_no_frames():
    """Frames of the engine have the prompt: thousands of ends would keep as many prompts."""
    log = HandoffLog()
    try:
        try:
            raise ValueError("first")
        except ValueError:
            raise LeaseEnded("late")  # noqa: B904 - with what it was raised from
    except LeaseEnded as error:
        log.end(ID, error)
    (end,) = await all_of(log)
    assert isinstance(end, LeaseEnded)
    assert (end.__traceback__, end.__context__, end.__cause__) == (None, None, None)


def end_of(request: int) -> AttemptId:
    return AttemptId(RequestId(f"other-{request}"), 1)


async def test_an_older_end_is_told_without_its_cause():
    log = HandoffLog(ends=HandoffEnds(max_whole=2, max_hashed=3))
    log.end(ID, Cancelled("by the router"))
    for number in range(4):
        log.end(end_of(number))
        (event,) = await all_of(log)
        assert isinstance(event, Cancelled if number == 0 else LeaseEnded)
    assert len(log) == 0


def forgetful(monkeypatch: pytest.MonkeyPatch, is_coming: Callable[[AttemptId], bool]) -> HandoffLog:
    """A log of which so many handoffs have ended that the end of `ID` is forgotten."""
    monkeypatch.setattr(handoff_log, "PATIENCE_S", 0.01)
    log = HandoffLog(is_coming, HandoffEnds(max_whole=1, max_hashed=1))
    for id in (ID, end_of(0), end_of(1)):
        log.end(id)
    return log


async def test_a_forgotten_end_is_told_after_a_short_wait(monkeypatch: pytest.MonkeyPatch):
    log = forgetful(monkeypatch, lambda id: False)
    (event,) = await all_of(log, timeout_s=60.0)
    assert isinstance(event, LeaseEnded)
    assert len(log) == 0


@pytest.mark.parametrize("comes_late", [False, True])
async def test_a_prompt_that_waits_is_watched_for_long(monkeypatch: pytest.MonkeyPatch, comes_late: bool):
    asked: list[AttemptId] = []
    waits = asyncio.Event()

    def is_coming(id: AttemptId) -> bool:
        asked.append(id)
        if len(asked) > 2 * comes_late:  # late: in doubt first, asked again after the patience, and then
            waits.set()
        return len(asked) > comes_late

    log = forgetful(monkeypatch, is_coming)
    watching = asyncio.create_task(all_of(log, timeout_s=60.0))
    await asyncio.wait_for(waits.wait(), 10.0)
    append(log, *CHUNKS, SEAL)
    assert await watching == [*CHUNKS, SEAL]


async def test_an_old_forgotten_end_leaves_no_doubt(monkeypatch: pytest.MonkeyPatch):
    """Nobody watches it any more: a watcher waits for a prompt that has not come yet."""
    monkeypatch.setattr(handoff_log, "WATCHABLE_S", 0.0)
    (event,) = await all_of(forgetful(monkeypatch, lambda id: False), timeout_s=0.02)
    assert isinstance(event, DeadlineExceeded)
