"""Contract of every `StateStore` (`baton.store.store`): sequences and workers, in memory and in a real Redis."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import LinkRecord, WorkerBudgets, WorkerLoad, WorkerRole, WorkerStatus
from baton.services.cli.processes import local_redis
from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.redis.keys import RedisKeys
from baton.store.store import RecordLost, SequenceRecord, StateStore, StoreUnavailable
from tests.contract.stores import DEADLINE_S, WORKER, OpenStore, listening
from tests.redis_server import ends_within, frozen, running_redis

E = RequestEvent
BRISK = StoreOptions(heartbeat_s=0.02, worker_ttl_s=0.1, retention_s=0.1, timeout_s=5.0)
OUTAGE = StoreOptions(heartbeat_s=0.02, timeout_s=1.0)
REQUEST = SequenceRecord(RequestId("r"), 1, RequestState.RECEIVED, "router-0", "tiny", num_prompt_tokens=7)


def attempt(number: int, id: RequestId = REQUEST.id) -> AttemptId:
    return AttemptId(id, number)


async def until(store: StateStore, condition: Callable[[], Awaitable[bool]]) -> None:
    async with listening(store) as changes:
        async for _ in changes:
            if await condition():
                return
    pytest.fail("the store closed before the condition was met")


# Sequences


async def test_a_sequence_is_created_once(store: StateStore) -> None:
    assert await store.get(REQUEST.id) is None
    assert await store.create(REQUEST)
    assert not await store.create(replace(REQUEST, router_id="router-1", num_prompt_tokens=9))
    assert await store.get(REQUEST.id) == REQUEST


async def test_only_received_sequences_are_created(store: StateStore) -> None:
    with pytest.raises(Broken, match="cannot be created"):
        await store.create(replace(REQUEST, state=RequestState.QUEUED))
    assert await store.get(REQUEST.id) is None


async def test_a_full_lifecycle_with_a_retry(store: StateStore) -> None:
    await store.create(REQUEST)
    for event in (E.ENQUEUE, E.RESERVE, E.PREFILL, E.SEAL, E.DECODE):
        await store.advance(attempt(1), event, num_emitted=3)
    assert await store.advance(attempt(1), E.INTERRUPT, failure_code="worker_lost") is RequestState.INTERRUPTED
    lost = replace(REQUEST, state=RequestState.INTERRUPTED, num_emitted=3, failure_code="worker_lost")
    assert await store.get(REQUEST.id) == lost
    assert await store.advance(attempt(2), E.RETRY) is RequestState.QUEUED
    for event in (E.RESERVE, E.DECODE, E.FINISH):
        state = await store.advance(attempt(2), event, num_emitted=2)  # never decreases
    assert state is RequestState.FINISHED
    assert await store.get(REQUEST.id) == replace(REQUEST, attempt=2, state=RequestState.FINISHED, num_emitted=3)


async def test_the_fingerprint_stays_until_replaced(store: StateStore) -> None:
    await store.create(REQUEST)
    await store.advance(attempt(1), E.ENQUEUE)
    assert await store.get(REQUEST.id) == replace(REQUEST, state=RequestState.QUEUED)
    await store.advance(attempt(1), E.RESERVE, fingerprint="old")
    await store.advance(attempt(1), E.INTERRUPT)
    await store.advance(attempt(2), E.RETRY)
    kept = await store.get(REQUEST.id)
    assert kept == replace(REQUEST, attempt=2, state=RequestState.QUEUED, fingerprint="old")
    await store.advance(attempt(2), E.RESERVE, fingerprint="new")
    assert await store.get(REQUEST.id) == replace(kept, state=RequestState.RESERVED, fingerprint="new")


async def test_a_sequence_is_created_with_its_fingerprint(store: StateStore) -> None:
    pinned = replace(REQUEST, fingerprint="old")
    assert await store.create(pinned)
    assert await store.get(REQUEST.id) == pinned


async def test_several_events_are_one_step(store: StateStore) -> None:
    await store.create(REQUEST)
    life = (E.ENQUEUE, E.RESERVE, E.PREFILL, E.INTERRUPT, E.RETRY, E.RESERVE, E.DECODE, E.INTERRUPT)
    state = await store.advance(attempt(1), *life, num_emitted=3, failure_code="worker_lost")
    assert state is RequestState.INTERRUPTED
    lost = replace(REQUEST, attempt=2, state=RequestState.INTERRUPTED, num_emitted=3, failure_code="worker_lost")
    assert await store.get(REQUEST.id) == lost
    assert await store.advance(attempt(3), E.RETRY, E.RESERVE) is RequestState.RESERVED
    assert await store.get(REQUEST.id) == replace(lost, attempt=3, state=RequestState.RESERVED, failure_code="")


@pytest.mark.parametrize(
    ("number", "events", "error"),
    [
        pytest.param(1, (E.ENQUEUE, E.SEAL), Broken, id="the second is not in the table"),
        pytest.param(3, (E.ENQUEUE, E.RESERVE), RecordLost, id="the first is ahead"),
        pytest.param(1, (E.ENQUEUE, E.RESERVE), Superseded, id="the first comes late"),
        pytest.param(2, (E.ENQUEUE, E.CANCEL, E.ENQUEUE), Broken, id="nothing follows the end"),
    ],
)
async def test_several_events_apply_all_or_none(
    store: StateStore, number: int, events: tuple[RequestEvent, ...], error: type[Exception]
) -> None:
    before = replace(REQUEST, attempt=2 if error is Superseded or number > 1 else 1)
    await store.create(before)
    with pytest.raises(error):
        await store.advance(attempt(number), *events, num_emitted=5)
    assert await store.get(REQUEST.id) == before


async def test_older_attempts_are_fenced_off(store: StateStore) -> None:
    await store.create(replace(REQUEST, attempt=3))
    before = await store.get(REQUEST.id)
    for event in (E.ENQUEUE, E.CANCEL, E.RETRY):
        with pytest.raises(Superseded):
            await store.advance(attempt(2), event)
    assert await store.get(REQUEST.id) == before


@pytest.mark.parametrize(
    ("number", "event", "error"),
    [(1, E.SEAL, Broken), (2, E.ENQUEUE, RecordLost), (2, E.RETRY, Broken), (3, E.RETRY, RecordLost)],
    ids=["not in the table", "attempt ahead", "retry of a live request", "retry skips an attempt"],
)
async def test_illegal_events_change_nothing(
    store: StateStore, number: int, event: RequestEvent, error: type[Exception]
) -> None:
    await store.create(REQUEST)
    with pytest.raises(error):
        await store.advance(attempt(number), event, num_emitted=5)
    assert await store.get(REQUEST.id) == REQUEST


async def test_unknown_sequences_cannot_advance(store: StateStore) -> None:
    with pytest.raises(RecordLost, match="no such request"):
        await store.advance(attempt(1), E.ENQUEUE)


@pytest.mark.parametrize(
    ("before", "step", "number", "error"),
    [((), E.ENQUEUE, 1, Broken), ((E.ENQUEUE, E.RESERVE, E.INTERRUPT), E.RETRY, 2, Superseded)],
    ids=["steps", "retries"],
)
async def test_of_many_equal_events_one_wins(
    store: StateStore, before: tuple[RequestEvent, ...], step: RequestEvent, number: int, error: type[Exception]
) -> None:
    await store.create(REQUEST)
    for event in before:
        await store.advance(attempt(1), event)
    outcomes = await asyncio.gather(*(store.advance(attempt(number), step) for _ in range(50)), return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, error)] == [RequestState.QUEUED]


async def test_sequences_expire_after_their_retention(open_store: OpenStore) -> None:
    store = await open_store(BRISK)
    await store.create(REQUEST)

    async def forgotten() -> bool:
        return await store.get(REQUEST.id) is None

    await until(store, forgotten)
    assert await store.create(REQUEST)


# Workers


async def test_workers_come_back_as_announced_and_in_order(store: StateStore) -> None:
    link = LinkRecord(WorkerId("prefill-0"), Incarnation(2**62 + 1), "nixl", 1.5e9, 1 << 20)
    full = replace(WORKER, load=WorkerLoad(1, 2, 3, 5, 6, 0.25), links=(link,), status=WorkerStatus.DRAINING)
    full = replace(full, budgets=WorkerBudgets(512, 8, 3))
    other = replace(WORKER, id=WorkerId("a"), role=WorkerRole.PREFILL)
    assert await store.announce(full)
    assert await store.announce(other)
    assert await store.workers() == [other, full]


async def test_a_new_incarnation_replaces_the_old_one_for_good(store: StateStore) -> None:
    older, newer = replace(WORKER, incarnation=Incarnation(2**62 + 1)), replace(WORKER, incarnation=Incarnation(2**62))
    assert await store.announce(older)
    await store.withdraw(older.id, older.incarnation)
    assert await store.announce(newer)
    assert not await store.announce(older)
    await store.withdraw(older.id, older.incarnation)
    assert await store.workers() == [newer]
    await store.withdraw(newer.id, newer.incarnation)
    await store.withdraw(newer.id, newer.incarnation)
    assert not await store.announce(older)
    assert await store.workers() == []


async def test_silent_workers_expire_but_replaced_incarnations_stay_fenced(open_store: OpenStore) -> None:
    store = await open_store(replace(BRISK, retention_s=60.0))
    older, newer = replace(WORKER, incarnation=Incarnation(1)), replace(WORKER, incarnation=Incarnation(2))
    await store.announce(older)

    async def empty() -> bool:
        return await store.workers() == []

    await until(store, empty)
    assert await store.announce(newer)
    await until(store, empty)
    assert not await store.announce(older)
    assert await store.announce(newer)


async def test_a_closed_store_says_so(store: StateStore) -> None:
    await store.ping()
    await store.close()
    await store.close()
    for call in (store.ping(), store.get(REQUEST.id), store.workers(), store.announce(WORKER)):
        with pytest.raises(StoreUnavailable, match="closed"):
            await call


# Redis only


async def test_everything_in_redis_expires_but_the_index(redis_store: tuple[StateStore, RedisKeys, Redis]) -> None:
    store, keys, outside = redis_store
    await store.create(REQUEST)
    assert await outside.pexpire(keys.sequence(REQUEST.id), 50_000)
    await store.advance(attempt(1), E.ENQUEUE)
    assert await outside.pttl(keys.sequence(REQUEST.id)) > 50_000
    await store.announce(WORKER)
    mine = {key.decode() async for key in outside.scan_iter(match=f"{keys.prefix}*")}
    lasting = {key for key in mine if await outside.pttl(key) == -1}
    assert len(mine) == 4
    assert lasting == {keys.workers}


async def test_only_changes_are_published(redis_store: tuple[StateStore, RedisKeys, Redis]) -> None:
    store, keys, outside = redis_store
    async with outside.pubsub(ignore_subscribe_messages=False) as pubsub, asyncio.timeout(DEADLINE_S):
        await pubsub.subscribe(keys.changes)
        assert (await anext(pubsub.listen()))["type"] == "subscribe"
        await store.announce(WORKER)
        for waiting in range(3):
            await store.announce(replace(WORKER, load=WorkerLoad(waiting_requests=waiting)))
        await outside.publish(keys.changes, "mark")
        heard = [(await anext(pubsub.listen()))["data"] for _ in range(2)]
    assert heard == [WORKER.id.encode(), b"mark"]


async def test_an_unreadable_worker_record_is_skipped(redis_store: tuple[StateStore, RedisKeys, Redis]) -> None:
    store, keys, outside = redis_store
    strange = replace(WORKER, id=WorkerId("strange"))
    await store.announce(WORKER)
    await store.announce(strange)
    await outside.hset(keys.worker(strange.id), "record", '{"id": "strange", "role": "oracle"}')
    assert await store.workers() == [WORKER]


async def test_a_killed_server_fails_then_recovers() -> None:
    with running_redis() as server:
        store, outside = await connect(server.url, OUTAGE), Redis.from_url(server.url)
        async with listening(store) as changes:
            await anext(changes)
            server.kill()
            for call in (
                store.ping(),
                store.create(REQUEST),
                store.get(REQUEST.id),
                store.announce(WORKER),
                store.workers(),
            ):
                with pytest.raises(StoreUnavailable, match="check that the server runs"):
                    await asyncio.wait_for(call, OUTAGE.timeout_s * 4)
            await anext(changes)
            server.start()
            assert await store.create(REQUEST)
            assert await store.advance(attempt(1), E.ENQUEUE) is RequestState.QUEUED
            assert await store.announce(WORKER)
            assert await store.workers() == [WORKER]
            async for _ in changes:  # until changes, not only heartbeats, are received again
                if (await outside.pubsub_numsub(RedisKeys(OUTAGE.prefix).changes))[0][1] == 1:
                    break
        await outside.aclose()
        await store.close()


async def test_a_frozen_server_times_out() -> None:
    with running_redis() as server:
        store = await connect(server.url, OUTAGE)
        with frozen(server):
            calls = [store.create(REQUEST), *(store.workers() for _ in range(40))]  # more than there are connections
            outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), OUTAGE.timeout_s * 10)
            assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 41
        assert await store.workers() == []
        await store.close()


async def test_an_absent_server_error_has_a_fix_and_no_password(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="start a redis-server, or use memory://"):
        await connect(f"unix://{tmp_path}/none", OUTAGE)
    with pytest.raises(StoreUnavailable) as caught:
        await connect("redis://me:secret@127.0.0.1:1/0", OUTAGE)
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="no state url"):
        await connect("http://here")


# The local server


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
        "import os, signal; from baton.services.cli.processes.local_redis import LocalRedis; s = LocalRedis(); "
        "s.start();"
        "os.write(1, f'{s.pid} {s.url}'.encode()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pid, url = parent.stdout.split()
    assert ends_within(int(pid), DEADLINE_S)
    Path(url.removeprefix("unix://")).parent.joinpath("log").unlink()
    Path(url.removeprefix("unix://")).parent.rmdir()  # the server has removed its socket


def test_without_a_server_binary_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_redis, "find_server", lambda: None)
    with pytest.raises(StoreUnavailable, match="install redis"):
        LocalRedis().start()
    bad = tmp_path / "redis-server"
    bad.write_text("#!/bin/sh\necho no memory left\nexit 3\n")
    bad.chmod(0o755)
    monkeypatch.setattr(local_redis, "find_server", lambda: bad)
    with pytest.raises(StoreUnavailable, match="status 3: no memory left"):
        LocalRedis().start()
