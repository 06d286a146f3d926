"""The book in Redis: compare-and-set by Lua scripts, workers with a TTL, changes by pub/sub.

Made by `connect`; shared by everything in one event loop. Written for one server with the Redis 6.2 command set. The
rules are those of `ledger`; the scripts get the table as data. A call whose answer was lost raises `StateUnavailable`
although it may have taken effect: callers look (`get`) before they repeat it, as `BookWriter` does.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Sequence
from typing import cast

from redis.asyncio import ConnectionPool, Redis

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.state import codec, ledger
from baton.state.base import CallRecord, CallStatus, JournalEntry, JournalPart, RequestRecord, Written
from baton.state.bell import Bell
from baton.state.keys import Keys
from baton.state.line import Line, connection_options, milliseconds
from baton.state.options import BookOptions
from baton.state.redis_calls import RedisCalls
from baton.state.subscription import Subscription

_COLUMNS = ledger.columns()


class RedisBook:
    """A `StateBook` on a Redis server. Opens connections when first needed and again after every outage."""

    def __init__(self, url: str, options: BookOptions | None = None) -> None:
        """`url` is `redis://`, `rediss://` or `unix://`. Raises `ValueError` for another one."""
        self._options = options or BookOptions()
        self._keys = Keys(self._options.prefix)
        self._line = Line(url, max_connections=self._options.max_connections, timeout_s=self._options.timeout_s)
        self._create, self._advance, self._announce, self._withdraw = (
            self._line.script(name) for name in ("create", "advance", "announce", "withdraw")
        )
        self._calls = RedisCalls(url, self._keys, self._options)
        self._bell = Bell(self._options.heartbeat_s)
        self._subscription = Subscription(
            Redis.from_pool(ConnectionPool.from_url(url, **connection_options())),
            self._keys.changes,
            on_message=self._bell.ring,
            heartbeat_s=self._options.heartbeat_s,
            timeout_s=self._options.timeout_s,
        )

    async def create(self, record: RequestRecord) -> bool:
        ledger.check_new(record)
        fields = [part for field in codec.request_to_fields(record).items() for part in field]
        async with self._line.answering("create"):
            created = await self._create(
                keys=[self._keys.request(record.id)], args=[milliseconds(self._options.retention_s), *fields]
            )
        return bool(created)

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        rules: list[str | int] = [id.attempt, _path(events)]
        news: list[str | int] = [num_emitted, failure_code, milliseconds(self._options.retention_s), fingerprint]
        keys = [self._keys.request(id.request_id)]
        async with self._line.answering("advance"):
            outcome, state, attempt, num_passed = await self._advance(keys=keys, args=[*rules, *news])
        return _verdict(id, events[min(int(num_passed), len(events) - 1)], outcome, state, int(attempt))

    async def get(self, id: RequestId) -> RequestRecord | None:
        async with self._line.answering("get"):
            fields = cast("dict[str, str]", await self._line.redis.hgetall(self._keys.request(id)))
        return codec.request_from_fields(fields) if fields else None

    async def open_call(self, record: CallRecord) -> bool:
        return await self._calls.open(record)

    async def end_call(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        return await self._calls.end(id, epoch, status)

    async def get_call(self, id: RequestId) -> CallRecord | None:
        return await self._calls.get(id)

    async def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        return await self._calls.claim(id, epoch, owner)

    async def hold(self, owner: OwnerId) -> None:
        await self._calls.hold(owner)

    async def let_go(self, owner: OwnerId) -> None:
        await self._calls.let_go(owner)

    async def orphans(self) -> list[CallRecord]:
        return await self._calls.orphans()

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[Written]:
        return await self._calls.write(entries)

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        return await self._calls.read(id, start, wait_s)

    async def announce(self, record: WorkerRecord) -> bool:
        keys = [self._keys.worker(record.id), self._keys.incarnations(record.id), self._keys.workers]
        what: list[str | int] = [record.id, record.incarnation, record.status.value, codec.worker_to_json(record)]
        lifetimes = [milliseconds(self._options.worker_ttl_s), milliseconds(self._options.retention_s)]
        async with self._line.answering("announce"):
            reigns = await self._announce(
                keys=keys, args=[*what, *lifetimes, self._options.max_incarnations, self._keys.changes]
            )
        return bool(reigns)

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        async with self._line.answering("withdraw"):
            await self._withdraw(
                keys=[self._keys.worker(id), self._keys.workers], args=[id, incarnation, self._keys.changes]
            )

    async def workers(self) -> list[WorkerRecord]:
        async with self._line.answering("list workers"):
            ids = sorted(cast("list[WorkerId]", await self._line.redis.zrange(self._keys.workers, 0, -1)))
            async with self._line.redis.pipeline(transaction=False) as pipeline:
                for id in ids:
                    pipeline.hget(self._keys.worker(id), "record")
                payloads = await pipeline.execute() if ids else []
        return [record for payload in payloads if payload and (record := codec.readable_worker(payload))]

    def changes(self) -> AsyncIterator[None]:
        if not self._line.closed:
            self._subscription.start()
        return self._bell.listen()

    async def ping(self) -> None:
        async with self._line.answering("ping"):
            await self._line.redis.ping()

    async def close(self) -> None:
        self._bell.close()
        await self._subscription.close()
        await self._line.close()
        await self._calls.close()


@functools.lru_cache(maxsize=1024)
def _path(events: tuple[RequestEvent, ...]) -> str:
    """What the script takes of events: of each, how many attempts it opens, and its column of the table."""
    return json.dumps([(ledger.num_opened(event), _COLUMNS[event]) for event in events])


def _verdict(id: AttemptId, event: RequestEvent, outcome: str, state: str, attempt: int) -> RequestState:
    """The new state, or the error that `ledger.moved` would have raised."""
    match outcome:
        case "moved":
            return RequestState(state)
        case "superseded":
            raise Superseded(ledger.superseded_message(id, event, attempt))
        case "unknown":
            raise Broken(f"{event.value} of {id}: no such request in the book")
        case "ahead":
            raise Broken(f"{event.value} of {id} must carry attempt {attempt + ledger.num_opened(event)}")
        case _:
            raise Broken(f"request in state {state} cannot {event.value}")
