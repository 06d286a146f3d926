"""State store in Redis: compare-and-set by Lua scripts, workers with a TTL, changes by pub/sub.

Made by `connect`; shared by everything in one event loop. Needs one server with the Redis 6.2 command set. The rules
are those of `transitions`; the scripts get the table as data. An operation whose answer was lost raises
`StoreUnavailable` although it may have taken effect: callers read (`get`) before they repeat it, as `StoreWriter` does.

Calls and journals have a client of their own, and so have waiting readers (a connection each): neither tokens nor
readers delay the worker registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import cast

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import ResponseError

from baton.domain.errors import BatonError, Broken, Superseded
from baton.domain.ids import (
    ATTEMPTS_PER_EPOCH,
    AttemptId,
    Ballot,
    Incarnation,
    OwnerId,
    RequestId,
    WorkerId,
    owner_tag,
)
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import WorkerRecord
from baton.store import transitions
from baton.store.durability import redis_durability
from baton.store.notifier import ChangeNotifier
from baton.store.options import StoreOptions
from baton.store.redis import record_codec
from baton.store.redis.client import RedisClient, connection_options, milliseconds
from baton.store.redis.journal_codec import JournalFormat
from baton.store.redis.keys import RedisKeys
from baton.store.redis.record_codec import RecordFormat
from baton.store.redis.subscription import ChannelSubscription
from baton.store.redis.unsealed_log import UnsealedLog
from baton.store.redis.write_commands import (
    RESUME_COLUMN,
    WriteCommands,
    call_owner,
    chains_to_args,
    journal_outcomes,
    pairs,
    read_chains,
)
from baton.store.seal import StoreSeal
from baton.store.store import (
    CallOwner,
    CallRecord,
    CallStatus,
    Durability,
    JournalEntry,
    JournalPart,
    LeaseState,
    LiveSequence,
    RecordLost,
    SequenceRecord,
    WorkerIdInUse,
    WriteOutcome,
)
from baton.store.write_chain import (
    AdvanceSequence,
    ChainedWrite,
    EndCall,
    PutCall,
    PutSequence,
    WriteJournal,
    WriteResult,
)

_Entries = list[tuple[bytes, dict[bytes, bytes]]]
_Streams = list[tuple[bytes, _Entries]]
MAX_AGE_RETENTIONS = 2
"""Oldest call in a cluster with a secret, in retentions: a copy that is put back later is not run."""

_REGISTRY_CONNECTIONS = 2
"""Connections that list workers: neither tokens nor readers use them."""

_TAKEN = -1
"""Answer of the announcement script when another incarnation holds the id."""


class RedisStore:
    """A `StateStore` on a Redis server. Connects when first needed, and again after every outage."""

    def __init__(self, url: str, options: StoreOptions | None = None, trust: ClusterTrust = OPEN_CLUSTER) -> None:
        """`url` is `redis://`, `rediss://` or `unix://`. Raises `ValueError` for another one.

        `trust`: its secrets seal what is stored of calls.
        """
        options = options or StoreOptions()
        self._num_foreign = 0  # orphans of other tokenizers in the last list
        seal, self._unsealed = StoreSeal(options.prefix, trust), UnsealedLog()
        self._records = RecordFormat(seal, self._unsealed, MAX_AGE_RETENTIONS * options.retention_s)
        self._journals = JournalFormat(seal, self._unsealed)
        self._options = options
        self._keys = RedisKeys(options.prefix)
        self._commands = WriteCommands(self._keys, self._records, self._journals, options)
        self._retention_ms = milliseconds(options.retention_s)
        self._lease_ms = milliseconds(options.owner_ttl_s)
        self._client = self._make_client(url, options.max_connections)
        self._call_client = self._make_client(url, options.max_connections, binary=True)
        self._registry_client = self._make_client(url, _REGISTRY_CONNECTIONS, binary=True)
        self._reader_client = self._make_client(url, options.max_waiting_readers, binary=True)
        self._announce, self._withdraw = (self._client.script(name) for name in ("announce", "withdraw"))
        self._create, self._advance, self._put_request = (
            self._call_client.script(name) for name in ("create_sequence", "advance_sequence", "put_request")
        )
        self._write_chains = self._call_client.script_connection("write_chains")
        self._put, self._end, self._claim, self._hold_lease, self._list_orphans, self._write_journal = (
            self._call_client.script(name)
            for name in ("put_call", "end_call", "claim_call", "hold_lease", "list_orphans", "write_journal")
        )
        self._notifier = ChangeNotifier(options.heartbeat_s)
        self._subscription = self._make_subscription(url)

    async def create(self, record: SequenceRecord) -> bool:
        transitions.check_new_sequence(record)
        fields = self._records.sequence_fields(record)
        async with self._call_client.operation("create"):
            created = await self._create(keys=[self._keys.sequence(record.id)], args=[self._retention_ms, *fields])
        return bool(created)

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        command = self._commands.advance(AdvanceSequence(id, events, num_emitted, failure_code, fingerprint))
        async with self._call_client.operation("advance"):
            reply = await self._advance(keys=command.keys, args=command.args)
        outcome, state, attempt, num_passed, tag = reply
        outcome, state = outcome.decode(), state.decode(errors="replace")
        if outcome != "applied":
            stored = AttemptId(id.request_id, int(attempt), int(tag))
            raise _refusal(id, events[int(num_passed)], outcome, state, stored)
        return RequestState(state)

    async def put_request(self, record: SequenceRecord) -> SequenceRecord:
        command = self._commands.put_sequence(PutSequence(record))
        async with self._call_client.operation("put a request"):
            reply = await self._put_request(keys=command.keys, args=command.args)
        return self._commands.stored_sequence(record, reply)

    async def get(self, id: RequestId) -> SequenceRecord | None:
        async with self._call_client.operation("get"):
            fields = await self._fields(self._keys.sequence(id))
        return self._records.sequence(id, fields) if fields else None

    async def put_call(self, record: CallRecord) -> CallOwner:
        command = self._commands.put_call(PutCall(record))
        async with self._call_client.operation("put a call"):
            reply = await self._put(keys=command.keys, args=command.args)
        return call_owner(reply)

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        command = self._commands.end_call(EndCall(id, ballot, status, trace, tuple(ended_sequences)))
        async with self._call_client.operation("end a call"):
            done = await self._end(keys=command.keys, args=command.args)
        if isinstance(done, bytes):
            raise LiveSequence(id, RequestId(done.decode()))
        return bool(done)

    async def get_call(self, id: RequestId) -> CallRecord | None:
        async with self._call_client.operation("get a call"):
            fields = await self._fields(self._keys.call(id))
        return self._records.call(fields, id) if fields else None

    async def claim_call(
        self,
        id: RequestId,
        ballot: Ballot,
        owner: OwnerId,
        *,
        floor: int = 0,
        seed: CallRecord | None = None,
    ) -> CallRecord | None:
        keys, router_id = self._keys, transitions.router_of(owner)
        missing = self._records.placeholder_fields(transitions.placeholder(RequestId(""), router_id, ballot))
        args: list[str | int | bytes] = [
            *(
                id,
                *ballot,
                owner,
                owner_tag(owner),
                router_id,
                max(floor, seed.epoch if seed else 0),
                self._retention_ms,
            ),
            *(keys.calls_of(OwnerId("")), keys.sequence(RequestId(""))),
            *(RESUME_COLUMN, ATTEMPTS_PER_EPOCH, json.dumps(missing), json.dumps(seed.sequence_ids if seed else ())),
            *(self._records.call_fields(seed) if seed else ()),
        ]
        async with self._call_client.operation("claim a call"):
            flat = await self._claim(keys=[keys.call(id), keys.owners], args=args)
        return self._records.call(pairs(flat), id) if flat else None

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        keys = [self._keys.lease(owner), self._keys.generation]
        args: list[str | int] = [self._lease_ms, number, secrets.token_hex(8), self._retention_ms]
        async with self._call_client.operation("renew a lease"):
            generation, before, server = await self._hold_lease(keys=keys, args=args)
        return LeaseState(generation.decode(), before, server.decode())

    async def release_lease(self, owner: OwnerId) -> None:
        async with self._call_client.operation("release a lease"):
            await self._call_client.redis.delete(self._keys.lease(owner))

    async def list_orphans(self) -> list[CallRecord]:
        names = [self._keys.lease(OwnerId("")), self._keys.calls_of(OwnerId("")), self._keys.call(RequestId(""))]
        most = (
            self._options.max_orphans + self._unsealed.num_calls + self._num_foreign
        )  # these must not hide the others
        async with self._call_client.operation("list orphans"):
            found = await self._list_orphans(keys=[self._keys.owners], args=[*names, most])
        calls = [call for flat in found if (call := self._records.call(pairs(flat)))]
        ours = [call for call in calls if self._options.may_claim(call.text_digest)]
        self._num_foreign = len(calls) - len(ours)
        return ours[: self._options.max_orphans]

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        if not entries:
            return []
        command = self._commands.write_journal(WriteJournal(tuple(entries)))
        async with self._call_client.operation("write tokens"):
            reply = await self._write_journal(keys=command.keys, args=command.args)
        return journal_outcomes(reply)

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        commands = [list(map(self._commands.of, chain)) for chain in chains]
        keys, args = chains_to_args(commands)
        async with self._call_client.operation("write calls"):
            reply = await self._write_chains(keys, args)
        return read_chains(commands, reply)

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        loop = asyncio.get_running_loop()
        after, until = f"{start}-0", loop.time() + wait_s
        async with self._reader_client.operation("read tokens", wait_s):
            while True:
                left_s = until - loop.time()
                entries = await self._entries_after(id, after, left_s)
                part = self._journals.part(id, [fields.get(b"d", b"") for _, fields in entries], start)
                if part.tokens or part.ended or not entries or left_s <= 0:
                    return part
                after = entries[-1][0].decode()  # these do not open: wait for later ones

    async def _entries_after(self, id: RequestId, after: str, wait_s: float) -> _Entries:
        block = milliseconds(wait_s) if wait_s > 0 else None
        found = cast("_Streams", await self._reader_client.redis.xread({self._keys.journal(id): after}, block=block))
        return found[0][1] if found else []

    async def announce(self, record: WorkerRecord) -> bool:
        keys = [self._keys.worker(record.id), self._keys.incarnations(record.id), self._keys.workers]
        args: list[str | int] = [
            *(record.id, record.incarnation, record.status.value, record_codec.worker_to_json(record)),
            *(milliseconds(self._options.worker_ttl_s), self._retention_ms),
            *(self._options.max_incarnations, self._keys.changes, record.routing_facts),
        ]
        async with self._client.operation("announce"):
            answer = await self._announce(keys=keys, args=args)
        if answer == _TAKEN:
            raise WorkerIdInUse(record.id)
        return bool(answer)

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        keys = [self._keys.worker(id), self._keys.workers]
        async with self._client.operation("withdraw"):
            await self._withdraw(keys=keys, args=[id, incarnation, self._keys.changes])

    async def workers(self) -> list[WorkerRecord]:
        redis, prefix = self._registry_client.redis, self._keys.worker(WorkerId("")).encode()
        async with self._registry_client.operation("list workers"):
            async with redis.pipeline(transaction=False) as pipeline:
                # A server that refuses writes (a full disk, no replica) lets the records of living workers expire: it
                # refuses this one as well, which removes nothing. A full memory does not.
                pipeline.zremrangebyscore(self._keys.workers, "-inf", 0)
                pipeline.zrange(self._keys.workers, 0, -1)
                _, ids = await pipeline.execute()
            async with redis.pipeline(transaction=False) as pipeline:
                ids = sorted(cast("list[bytes]", ids))
                for id in ids:
                    pipeline.hget(cast("str", prefix + id), "record")
                payloads = await pipeline.execute(raise_on_error=False) if ids else []
            for error in payloads:
                if isinstance(error, ResponseError) and not _is_other_type(error):
                    raise error  # only a key that is no hash is nobody's record
        stored = ((id, payload) for id, payload in zip(ids, payloads, strict=True) if isinstance(payload, bytes))
        found = (record_codec.try_worker_from_json(payload, id) for id, payload in stored)
        return [record for record in found if record is not None]

    def changes(self) -> AsyncIterator[None]:
        if not self._client.closed:
            self._subscription.start()
        return self._notifier.listen()

    async def ping(self) -> None:
        async with self._client.operation("ping"):
            await self._client.redis.ping()

    async def durability(self) -> Durability:
        redis = self._client.redis
        async with self._client.operation("read its configuration"):
            info = {**await redis.info("persistence"), **await redis.info("memory")}
            config: dict[str | None, str | None] = {}
            with contextlib.suppress(ResponseError):  # managed servers refuse it
                for name in ("appendfsync", "min-replicas-to-write"):
                    config |= await redis.config_get(name)
        return redis_durability(info, config)

    async def close(self) -> None:
        self._notifier.close()
        await self._subscription.close()
        for client in (self._client, self._call_client, self._registry_client, self._reader_client):
            await client.close()

    async def _fields(self, key: str) -> dict[bytes, bytes]:
        """A hash; empty for a key of another type, which the next write replaces."""
        try:
            return cast("dict[bytes, bytes]", await self._call_client.redis.hgetall(key))
        except ResponseError as error:
            if not _is_other_type(error):
                raise
            return {}

    def _make_client(self, url: str, max_connections: int, *, binary: bool = False) -> RedisClient:
        return RedisClient(url, max_connections=max_connections, timeout_s=self._options.timeout_s, binary=binary)

    def _make_subscription(self, url: str) -> ChannelSubscription:
        return ChannelSubscription(
            Redis.from_pool(ConnectionPool.from_url(url, **connection_options(binary=True))),
            self._keys.changes,
            on_message=self._notifier.notify,
            heartbeat_s=self._options.heartbeat_s,
            timeout_s=self._options.timeout_s,
        )


def _is_other_type(error: ResponseError) -> bool:
    return str(error).startswith("WRONGTYPE")


def _refusal(id: AttemptId, event: RequestEvent, outcome: str, state: str, stored: AttemptId) -> BatonError:
    """Returns the error that `transitions.apply_event` would have raised."""
    match outcome:
        case "superseded":
            return Superseded(transitions.superseded_message(id, event, stored.attempt), stored)
        case "unknown":
            return RecordLost(transitions.lost_message(id, event, None))
        case "ahead":
            return RecordLost(transitions.lost_message(id, event, stored.attempt))
        case _:
            return Broken(f"request in state {state} cannot {event.value}")
