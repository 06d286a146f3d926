"""State store in Redis: compare-and-set by Lua scripts, workers with a TTL, changes by pub/sub.

Made by `connect`; shared by everything in one event loop. Needs one server with the Redis 6.2 command set. The rules
are those of `transitions`; the scripts get the table as data. An operation whose answer was lost raises
`StoreUnavailable` although it may have taken effect: callers read (`get`) before they repeat it, as `StoreWriter` does.
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
from baton.store import transitions
from baton.store.notifier import ChangeNotifier
from baton.store.options import StoreOptions
from baton.store.redis import record_codec
from baton.store.redis.client import RedisClient, connection_options, milliseconds
from baton.store.redis.keys import RedisKeys
from baton.store.redis.redis_call_store import RedisCallStore
from baton.store.redis.subscription import ChannelSubscription
from baton.store.store import CallRecord, CallStatus, JournalEntry, JournalPart, SequenceRecord, WriteOutcome

_TARGETS_BY_EVENT = transitions.targets_by_event()


class RedisStore:
    """A `StateStore` on a Redis server. Opens connections when first needed and again after every outage."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        """`url` is `redis://`, `rediss://` or `unix://`. Raises `ValueError` for another one."""
        self._options = options or StoreOptions()
        self._keys = RedisKeys(self._options.prefix)
        self._client = RedisClient(
            url, max_connections=self._options.max_connections, timeout_s=self._options.timeout_s
        )
        self._create, self._advance, self._announce, self._withdraw = (
            self._client.script(name) for name in ("create_sequence", "advance_sequence", "announce", "withdraw")
        )
        self._calls = RedisCallStore(url, self._keys, self._options)
        self._notifier = ChangeNotifier(self._options.heartbeat_s)
        self._subscription = ChannelSubscription(
            Redis.from_pool(ConnectionPool.from_url(url, **connection_options())),
            self._keys.changes,
            on_message=self._notifier.notify,
            heartbeat_s=self._options.heartbeat_s,
            timeout_s=self._options.timeout_s,
        )

    async def create(self, record: SequenceRecord) -> bool:
        transitions.check_new_sequence(record)
        fields = [part for field in record_codec.sequence_to_fields(record).items() for part in field]
        async with self._client.operation("create"):
            created = await self._create(
                keys=[self._keys.sequence(record.id)], args=[milliseconds(self._options.retention_s), *fields]
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
        rules: list[str | int] = [id.attempt, _encode_events(events)]
        news: list[str | int] = [num_emitted, failure_code, milliseconds(self._options.retention_s), fingerprint]
        keys = [self._keys.sequence(id.request_id)]
        async with self._client.operation("advance"):
            outcome, state, attempt, num_passed = await self._advance(keys=keys, args=[*rules, *news])
        return _parse_outcome(id, events[min(int(num_passed), len(events) - 1)], outcome, state, int(attempt))

    async def get(self, id: RequestId) -> SequenceRecord | None:
        async with self._client.operation("get"):
            fields = cast("dict[str, str]", await self._client.redis.hgetall(self._keys.sequence(id)))
        return record_codec.sequence_from_fields(fields) if fields else None

    async def open_call(self, record: CallRecord) -> bool:
        return await self._calls.open(record)

    async def end_call(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        return await self._calls.end(id, epoch, status)

    async def get_call(self, id: RequestId) -> CallRecord | None:
        return await self._calls.get(id)

    async def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        return await self._calls.claim(id, epoch, owner)

    async def renew_lease(self, owner: OwnerId) -> None:
        await self._calls.renew_lease(owner)

    async def release_lease(self, owner: OwnerId) -> None:
        await self._calls.release_lease(owner)

    async def list_orphans(self) -> list[CallRecord]:
        return await self._calls.list_orphans()

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        return await self._calls.write(entries)

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        return await self._calls.read(id, start, wait_s)

    async def announce(self, record: WorkerRecord) -> bool:
        keys = [self._keys.worker(record.id), self._keys.incarnations(record.id), self._keys.workers]
        what: list[str | int] = [
            record.id,
            record.incarnation,
            record.status.value,
            record_codec.worker_to_json(record),
        ]
        lifetimes = [milliseconds(self._options.worker_ttl_s), milliseconds(self._options.retention_s)]
        async with self._client.operation("announce"):
            is_newest = await self._announce(
                keys=keys, args=[*what, *lifetimes, self._options.max_incarnations, self._keys.changes]
            )
        return bool(is_newest)

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        async with self._client.operation("withdraw"):
            await self._withdraw(
                keys=[self._keys.worker(id), self._keys.workers], args=[id, incarnation, self._keys.changes]
            )

    async def workers(self) -> list[WorkerRecord]:
        async with self._client.operation("list workers"):
            ids = sorted(cast("list[WorkerId]", await self._client.redis.zrange(self._keys.workers, 0, -1)))
            async with self._client.redis.pipeline(transaction=False) as pipeline:
                for id in ids:
                    pipeline.hget(self._keys.worker(id), "record")
                payloads = await pipeline.execute() if ids else []
        return [record for payload in payloads if payload and (record := record_codec.try_worker_from_json(payload))]

    def changes(self) -> AsyncIterator[None]:
        if not self._client.closed:
            self._subscription.start()
        return self._notifier.listen()

    async def ping(self) -> None:
        async with self._client.operation("ping"):
            await self._client.redis.ping()

    async def close(self) -> None:
        self._notifier.close()
        await self._subscription.close()
        await self._client.close()
        await self._calls.close()


@functools.lru_cache(maxsize=1024)
def _encode_events(events: tuple[RequestEvent, ...]) -> str:
    """What the script takes of events: of each, how many attempts it opens, and its column of the table."""
    return json.dumps([(transitions.num_attempts_opened(event), _TARGETS_BY_EVENT[event]) for event in events])


def _parse_outcome(id: AttemptId, event: RequestEvent, outcome: str, state: str, attempt: int) -> RequestState:
    """The new state, or the error that `transitions.apply_event` would have raised."""
    match outcome:
        case "applied":
            return RequestState(state)
        case "superseded":
            raise Superseded(transitions.superseded_message(id, event, attempt))
        case "unknown":
            raise Broken(f"{event.value} of {id}: no such request in the store")
        case "ahead":
            raise Broken(f"{event.value} of {id} must carry attempt {attempt + transitions.num_attempts_opened(event)}")
        case _:
            raise Broken(f"request in state {state} cannot {event.value}")
