"""One suite for every book: what `baton.state.base` promises, kept by memory and by a real Redis.

After it, what only Redis can get wrong: outages, other versions, and the server that we start ourselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import LinkRecord, WorkerLoad, WorkerRecord, WorkerRole, WorkerStatus
from baton.state import embedded
from baton.state.base import RequestRecord, StateBook, StateUnavailable
from baton.state.connect import connect
from baton.state.embedded import EmbeddedRedis
from baton.state.keys import Keys
from baton.state.options import BookOptions
from tests.contract.books import DEADLINE_S, OpenBook
from tests.redis_server import ends_within, frozen, running_redis

E = RequestEvent
BRISK = BookOptions(heartbeat_s=0.02, worker_ttl_s=0.1, retention_s=0.1, timeout_s=5.0)
OUTAGE = BookOptions(heartbeat_s=0.02, timeout_s=1.0)
REQUEST = RequestRecord(RequestId("r"), 1, RequestState.RECEIVED, "router-0", "tiny", num_prompt_tokens=7)
WORKER = WorkerRecord(
    WorkerId("decode-0"), WorkerRole.DECODE, Incarnation(2**63 - 1), "10.0.0.1:7", "tiny", "f00d", 16, 4096, 32000
)  # fmt: skip


def attempt(number: int, id: RequestId = REQUEST.id) -> AttemptId:
    return AttemptId(id, number)


@contextlib.asynccontextmanager
async def listening(book: StateBook) -> AsyncIterator[AsyncIterator[None]]:
    """`changes()` with a deadline over all of it, and a clean end."""
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(cast(AsyncGenerator[None], book.changes())) as changes:
        yield changes


async def until(book: StateBook, condition: Callable[[], Awaitable[bool]]) -> None:
    async with listening(book) as changes:
        async for _ in changes:
            if await condition():
                return
    pytest.fail("the book closed before the condition came true")


# Requests


async def test_a_request_is_entered_once(book: StateBook) -> None:
    assert await book.get(REQUEST.id) is None
    assert await book.create(REQUEST)
    assert not await book.create(replace(REQUEST, router_id="router-1", num_prompt_tokens=9))
    assert await book.get(REQUEST.id) == REQUEST


async def test_only_received_requests_are_entered(book: StateBook) -> None:
    with pytest.raises(Broken, match="cannot be entered"):
        await book.create(replace(REQUEST, state=RequestState.QUEUED))
    assert await book.get(REQUEST.id) is None


async def test_a_whole_life_with_a_retry(book: StateBook) -> None:
    await book.create(REQUEST)
    for event in (E.ENQUEUE, E.PROMISE, E.PREFILL, E.SEAL, E.DECODE):
        await book.advance(attempt(1), event, num_emitted=3)
    assert await book.advance(attempt(1), E.INTERRUPT, failure_code="worker_lost") is RequestState.INTERRUPTED
    lost = replace(REQUEST, state=RequestState.INTERRUPTED, num_emitted=3, failure_code="worker_lost")
    assert await book.get(REQUEST.id) == lost
    assert await book.advance(attempt(2), E.RETRY) is RequestState.QUEUED
    for event in (E.PROMISE, E.DECODE, E.FINISH):
        state = await book.advance(attempt(2), event, num_emitted=2)  # never goes down
    assert state is RequestState.FINISHED
    assert await book.get(REQUEST.id) == replace(REQUEST, attempt=2, state=RequestState.FINISHED, num_emitted=3)


async def test_the_fingerprint_stays_until_another_one_comes(book: StateBook) -> None:
    await book.create(REQUEST)
    await book.advance(attempt(1), E.ENQUEUE)
    assert await book.get(REQUEST.id) == replace(REQUEST, state=RequestState.QUEUED)
    await book.advance(attempt(1), E.PROMISE, fingerprint="old")
    await book.advance(attempt(1), E.INTERRUPT)
    await book.advance(attempt(2), E.RETRY)
    kept = await book.get(REQUEST.id)
    assert kept == replace(REQUEST, attempt=2, state=RequestState.QUEUED, fingerprint="old")
    await book.advance(attempt(2), E.PROMISE, fingerprint="new")
    assert await book.get(REQUEST.id) == replace(kept, state=RequestState.PROMISED, fingerprint="new")


async def test_a_request_is_entered_with_its_fingerprint(book: StateBook) -> None:
    pinned = replace(REQUEST, fingerprint="old")
    assert await book.create(pinned)
    assert await book.get(REQUEST.id) == pinned


async def test_several_events_are_one_step(book: StateBook) -> None:
    await book.create(REQUEST)
    life = (E.ENQUEUE, E.PROMISE, E.PREFILL, E.INTERRUPT, E.RETRY, E.PROMISE, E.DECODE, E.INTERRUPT)
    state = await book.advance(attempt(1), *life, num_emitted=3, failure_code="worker_lost")
    assert state is RequestState.INTERRUPTED
    lost = replace(REQUEST, attempt=2, state=RequestState.INTERRUPTED, num_emitted=3, failure_code="worker_lost")
    assert await book.get(REQUEST.id) == lost
    assert await book.advance(attempt(3), E.RETRY, E.PROMISE) is RequestState.PROMISED
    assert await book.get(REQUEST.id) == replace(lost, attempt=3, state=RequestState.PROMISED, failure_code="")


@pytest.mark.parametrize(
    ("number", "events", "error"),
    [
        pytest.param(1, (E.ENQUEUE, E.SEAL), Broken, id="the second is not in the table"),
        pytest.param(3, (E.ENQUEUE, E.PROMISE), Broken, id="the first is ahead"),
        pytest.param(1, (E.ENQUEUE, E.PROMISE), Superseded, id="the first comes late"),
        pytest.param(2, (E.ENQUEUE, E.CANCEL, E.ENQUEUE), Broken, id="nothing follows the end"),
    ],
)
async def test_of_several_events_all_happen_or_none(
    book: StateBook, number: int, events: tuple[RequestEvent, ...], error: type[Exception]
) -> None:
    before = replace(REQUEST, attempt=2 if error is Superseded or number > 1 else 1)
    await book.create(before)
    with pytest.raises(error):
        await book.advance(attempt(number), *events, num_emitted=5)
    assert await book.get(REQUEST.id) == before


async def test_older_attempts_are_fenced_off(book: StateBook) -> None:
    await book.create(replace(REQUEST, attempt=3))
    before = await book.get(REQUEST.id)
    for event in (E.ENQUEUE, E.CANCEL, E.RETRY):
        with pytest.raises(Superseded):
            await book.advance(attempt(2), event)
    assert await book.get(REQUEST.id) == before


@pytest.mark.parametrize(
    ("number", "event"),
    [(1, E.SEAL), (2, E.ENQUEUE), (2, E.RETRY), (3, E.RETRY)],
    ids=["not in the table", "attempt ahead", "retry of a live request", "retry skips an attempt"],
)
async def test_wrong_steps_change_nothing(book: StateBook, number: int, event: RequestEvent) -> None:
    await book.create(REQUEST)
    with pytest.raises(Broken):
        await book.advance(attempt(number), event, num_emitted=5)
    assert await book.get(REQUEST.id) == REQUEST


async def test_unknown_requests_cannot_move(book: StateBook) -> None:
    with pytest.raises(Broken, match="no such request"):
        await book.advance(attempt(1), E.ENQUEUE)


@pytest.mark.parametrize(
    ("before", "step", "number", "error"),
    [((), E.ENQUEUE, 1, Broken), ((E.ENQUEUE, E.PROMISE, E.INTERRUPT), E.RETRY, 2, Superseded)],
    ids=["steps", "retries"],
)
async def test_of_many_equal_steps_one_wins(
    book: StateBook, before: tuple[RequestEvent, ...], step: RequestEvent, number: int, error: type[Exception]
) -> None:
    await book.create(REQUEST)
    for event in before:
        await book.advance(attempt(1), event)
    outcomes = await asyncio.gather(*(book.advance(attempt(number), step) for _ in range(50)), return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, error)] == [RequestState.QUEUED]


async def test_requests_are_forgotten_after_their_retention(open_book: OpenBook) -> None:
    book = await open_book(BRISK)
    await book.create(REQUEST)

    async def forgotten() -> bool:
        return await book.get(REQUEST.id) is None

    await until(book, forgotten)
    assert await book.create(REQUEST)


# Workers


async def test_workers_come_back_as_announced_and_in_order(book: StateBook) -> None:
    link = LinkRecord(WorkerId("prefill-0"), Incarnation(2**62 + 1), "nixl", 1.5e9, 1 << 20)
    full = replace(WORKER, load=WorkerLoad(1, 2, 3, 4, 5, 6, 0.25), links=(link,), status=WorkerStatus.DRAINING)
    other = replace(WORKER, id=WorkerId("a"), role=WorkerRole.PREFILL)
    assert await book.announce(full)
    assert await book.announce(other)
    assert await book.workers() == [other, full]


async def test_a_new_incarnation_replaces_the_old_one_for_good(book: StateBook) -> None:
    older, newer = replace(WORKER, incarnation=Incarnation(2**62 + 1)), replace(WORKER, incarnation=Incarnation(2**62))
    assert await book.announce(older)
    assert await book.announce(newer)
    assert not await book.announce(older)
    await book.withdraw(older.id, older.incarnation)
    assert await book.workers() == [newer]
    await book.withdraw(newer.id, newer.incarnation)
    await book.withdraw(newer.id, newer.incarnation)
    assert not await book.announce(older)
    assert await book.workers() == []


async def test_silent_workers_are_gone_but_their_successors_still_reign(open_book: OpenBook) -> None:
    book = await open_book(replace(BRISK, retention_s=60.0))
    older, newer = replace(WORKER, incarnation=Incarnation(1)), replace(WORKER, incarnation=Incarnation(2))
    await book.announce(older)
    await book.announce(newer)

    async def empty() -> bool:
        return await book.workers() == []

    await until(book, empty)
    assert not await book.announce(older)
    assert await book.announce(newer)


async def test_changes_wake_on_join_status_and_leave(book: StateBook) -> None:
    async with listening(book) as changes:
        await anext(changes)
        await book.announce(WORKER)
        await anext(changes)
        await book.announce(replace(WORKER, status=WorkerStatus.DRAINING))
        await anext(changes)
        await book.withdraw(WORKER.id, WORKER.incarnation)
        await anext(changes)
        await book.announce(replace(WORKER, incarnation=Incarnation(5)))
        await anext(changes)


async def test_changes_beat_without_news_and_end_with_the_book(open_book: OpenBook) -> None:
    book = await open_book(BRISK)
    num_beats = 0
    async with listening(book) as changes:
        async for _ in changes:
            num_beats += 1
            if num_beats == 3:
                await book.close()
    assert num_beats == 3


async def test_a_closed_book_says_so(book: StateBook) -> None:
    await book.ping()
    await book.close()
    await book.close()
    for call in (book.ping(), book.get(REQUEST.id), book.workers(), book.announce(WORKER)):
        with pytest.raises(StateUnavailable, match="closed"):
            await call


# What only Redis can get wrong


async def test_everything_in_redis_expires_but_the_index(redis_book: tuple[StateBook, Keys, Redis]) -> None:
    book, keys, outside = redis_book
    await book.create(REQUEST)
    assert await outside.pexpire(keys.request(REQUEST.id), 50_000)
    await book.advance(attempt(1), E.ENQUEUE)
    assert await outside.pttl(keys.request(REQUEST.id)) > 50_000
    await book.announce(WORKER)
    mine = {key.decode() async for key in outside.scan_iter(match=f"{keys.prefix}*")}
    lasting = {key for key in mine if await outside.pttl(key) == -1}
    assert len(mine) == 4
    assert lasting == {keys.workers}


async def test_only_news_is_published(redis_book: tuple[StateBook, Keys, Redis]) -> None:
    book, keys, outside = redis_book
    async with outside.pubsub(ignore_subscribe_messages=False) as pubsub, asyncio.timeout(DEADLINE_S):
        await pubsub.subscribe(keys.changes)
        assert (await anext(pubsub.listen()))["type"] == "subscribe"
        await book.announce(WORKER)
        for waiting in range(3):
            await book.announce(replace(WORKER, load=WorkerLoad(waiting_requests=waiting)))
        await outside.publish(keys.changes, "mark")
        heard = [(await anext(pubsub.listen()))["data"] for _ in range(2)]
    assert heard == [WORKER.id.encode(), b"mark"]


async def test_a_worker_of_another_version_hides_nobody(redis_book: tuple[StateBook, Keys, Redis]) -> None:
    book, keys, outside = redis_book
    strange = replace(WORKER, id=WorkerId("strange"))
    await book.announce(WORKER)
    await book.announce(strange)
    await outside.hset(keys.worker(strange.id), "record", '{"id": "strange", "role": "oracle"}')
    assert await book.workers() == [WORKER]


async def test_a_killed_server_is_an_error_and_then_works_again() -> None:
    with running_redis() as server:
        book, outside = await connect(server.url, OUTAGE), Redis.from_url(server.url)
        async with listening(book) as changes:
            await anext(changes)
            server.kill()
            for call in (
                book.ping(),
                book.create(REQUEST),
                book.get(REQUEST.id),
                book.announce(WORKER),
                book.workers(),
            ):
                with pytest.raises(StateUnavailable, match="check that the server runs"):
                    await asyncio.wait_for(call, OUTAGE.timeout_s * 4)
            await anext(changes)
            server.start()
            assert await book.create(REQUEST)
            assert await book.advance(attempt(1), E.ENQUEUE) is RequestState.QUEUED
            assert await book.announce(WORKER)
            assert await book.workers() == [WORKER]
            async for _ in changes:  # until news, not only beats, would be heard again
                if (await outside.pubsub_numsub(Keys(OUTAGE.prefix).changes))[0][1] == 1:
                    break
        await outside.aclose()
        await book.close()


async def test_a_frozen_server_cannot_hold_a_call() -> None:
    with running_redis() as server:
        book = await connect(server.url, OUTAGE)
        with frozen(server):
            calls = [book.create(REQUEST), *(book.workers() for _ in range(40))]  # more than there are connections
            outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), OUTAGE.timeout_s * 10)
            assert [type(outcome) for outcome in outcomes] == [StateUnavailable] * 41
        assert await book.workers() == []
        await book.close()


async def test_an_absent_server_is_named_with_a_remedy_and_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StateUnavailable, match="start a redis-server, or use memory://"):
        await connect(f"unix://{tmp_path}/none", OUTAGE)
    with pytest.raises(StateUnavailable) as caught:
        await connect("redis://me:secret@127.0.0.1:1/0", OUTAGE)
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="no state url"):
        await connect("http://here")


# The server that we start


def test_a_stopped_server_leaves_nothing_behind() -> None:
    with running_redis() as server:
        pid, folder = server.pid, Path(server.url.removeprefix("unix://")).parent
        assert pid is not None
        assert folder.is_dir()
    assert server.pid is None
    assert ends_within(pid, 0)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel for a signal")
def test_the_server_dies_with_its_parent() -> None:
    with running_redis():
        pass  # there is a binary, or this test was skipped
    program = (
        "import os, signal; from baton.state.embedded import EmbeddedRedis; s = EmbeddedRedis(); s.start();"
        "os.write(1, f'{s.pid} {s.url}'.encode()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pid, url = parent.stdout.split()
    assert ends_within(int(pid), DEADLINE_S)
    Path(url.removeprefix("unix://")).parent.joinpath("log").unlink()
    Path(url.removeprefix("unix://")).parent.rmdir()  # the socket went with the server


def test_without_a_server_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "find_server", lambda: None)
    with pytest.raises(StateUnavailable, match="install redis"):
        EmbeddedRedis().start()
    bad = tmp_path / "redis-server"
    bad.write_text("#!/bin/sh\necho no memory left\nexit 3\n")
    bad.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: bad)
    with pytest.raises(StateUnavailable, match="status 3: no memory left"):
        EmbeddedRedis().start()
