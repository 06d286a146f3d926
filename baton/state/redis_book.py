"""The book in Redis: compare-and-set by Lua scripts, workers with a TTL, changes by pub/sub.

Made by `connect`; shared by everything in one event loop. Written for one server with the Redis 6.2 command set. The
rules are those of `ledger`; the scripts get the table as data. A call whose answer was lost raises `StateUnavailable`
although it may have taken effect: callers look (`get`) before they repeat it, as `BookWriter` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
from collections.abc import AsyncIterator
from typing import cast

import structlog
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.state import codec, ledger
from baton.state.base import RequestRecord, StateUnavailable
from baton.state.bell import Bell
from baton.state.keys import Keys
from baton.state.options import BookOptions
from baton.state.subscription import Subscription

_log = structlog.get_logger(__name__)
_COLUMNS = {event: json.dumps(column) for event, column in ledger.columns().items()}


class RedisBook:
    """A `StateBook` on a Redis server. Opens connections when first needed and again after every outage."""

    def __init__(self, url: str, options: BookOptions | None = None) -> None:
        """`url` is `redis://`, `rediss://` or `unix://`. Raises `ValueError` for another one."""
        self._options = options or BookOptions()
        self._keys = Keys(self._options.prefix)
        self._where = without_password(url)
        pool = BlockingConnectionPool.from_url(
            url, max_connections=self._options.max_connections, timeout=None, **_connection()
        )
        self._redis: Redis = Redis.from_pool(pool)
        self._create, self._advance, self._announce, self._withdraw = (
            _script(self._redis, name) for name in ("create", "advance", "announce", "withdraw")
        )
        self._bell = Bell(self._options.heartbeat_s)
        self._subscription = Subscription(
            Redis.from_pool(ConnectionPool.from_url(url, **_connection())),
            self._keys.changes,
            on_message=self._bell.ring,
            heartbeat_s=self._options.heartbeat_s,
            timeout_s=self._options.timeout_s,
        )
        self._closed = False

    async def create(self, record: RequestRecord) -> bool:
        ledger.check_new(record)
        fields = [part for field in codec.request_to_fields(record).items() for part in field]
        async with self._answering("create"):
            created = await self._create(
                keys=[self._keys.request(record.id)], args=[_milliseconds(self._options.retention_s), *fields]
            )
        return bool(created)

    async def advance(
        self, id: AttemptId, event: RequestEvent, *, num_emitted: int = 0, failure_code: str = ""
    ) -> RequestState:
        rules: list[str | int] = [id.attempt, ledger.num_opened(event), _COLUMNS[event]]
        news: list[str | int] = [num_emitted, failure_code, _milliseconds(self._options.retention_s)]
        keys = [self._keys.request(id.request_id)]
        async with self._answering("advance"):
            outcome, state, attempt = await self._advance(keys=keys, args=[*rules, *news])
        return _verdict(id, event, outcome, state, int(attempt))

    async def get(self, id: RequestId) -> RequestRecord | None:
        async with self._answering("get"):
            fields = cast("dict[str, str]", await self._redis.hgetall(self._keys.request(id)))
        return codec.request_from_fields(fields) if fields else None

    async def announce(self, record: WorkerRecord) -> bool:
        keys = [self._keys.worker(record.id), self._keys.incarnations(record.id), self._keys.workers]
        what: list[str | int] = [record.id, record.incarnation, record.status.value, codec.worker_to_json(record)]
        lifetimes = [_milliseconds(self._options.worker_ttl_s), _milliseconds(self._options.retention_s)]
        async with self._answering("announce"):
            reigns = await self._announce(
                keys=keys, args=[*what, *lifetimes, self._options.max_incarnations, self._keys.changes]
            )
        return bool(reigns)

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        async with self._answering("withdraw"):
            await self._withdraw(
                keys=[self._keys.worker(id), self._keys.workers], args=[id, incarnation, self._keys.changes]
            )

    async def workers(self) -> list[WorkerRecord]:
        async with self._answering("list workers"):
            ids = sorted(cast("list[WorkerId]", await self._redis.zrange(self._keys.workers, 0, -1)))
            async with self._redis.pipeline(transaction=False) as pipeline:
                for id in ids:
                    pipeline.hget(self._keys.worker(id), "record")
                payloads = await pipeline.execute() if ids else []
        return [record for payload in payloads if payload and (record := _readable(payload))]

    def changes(self) -> AsyncIterator[None]:
        if not self._closed:
            self._subscription.start()
        return self._bell.listen()

    async def ping(self) -> None:
        async with self._answering("ping"):
            await self._redis.ping()

    async def close(self) -> None:
        self._closed = True
        self._bell.close()
        await self._subscription.close()
        await self._redis.aclose()

    @contextlib.asynccontextmanager
    async def _answering(self, doing: str) -> AsyncIterator[None]:
        """One deadline for everything inside, and one error for all that can go wrong with a server."""
        if self._closed:
            raise StateUnavailable("this book has been closed; open another with `connect`")
        try:
            async with asyncio.timeout(self._options.timeout_s):
                yield
        except TimeoutError as error:
            raise self._unavailable(doing, f"no answer within {self._options.timeout_s} s") from error
        except (RedisError, OSError) as error:
            raise self._unavailable(doing, str(error) or type(error).__name__) from error

    def _unavailable(self, doing: str, why: str) -> StateUnavailable:
        return StateUnavailable(
            f"redis at {self._where} cannot {doing}: {why}; check that the server runs there and takes connections"
        )


def without_password(url: str) -> str:
    """The url as it may be shown in logs and errors."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _connection() -> dict[str, object]:
    """What every connection shares. No silent repeats: a script that ran must not run again behind our back."""
    return {
        "decode_responses": True,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,  # the deadline is the book's own, and covers connecting as well
        "socket_connect_timeout": None,
    }


def _script(redis: Redis, name: str) -> AsyncScript:
    """A script by its name; redis-py loads it again by itself after the server has lost it."""
    source = importlib.resources.files("baton.state").joinpath("scripts", f"{name}.lua")
    return redis.register_script(source.read_text(encoding="utf-8"))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


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


def _readable(payload: str) -> WorkerRecord | None:
    """One worker of another version must not hide all the others."""
    try:
        return codec.worker_from_json(payload)
    except StateUnavailable as error:
        _log.warning("worker_record_unreadable", reason=str(error))
        return None
