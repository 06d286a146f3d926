"""Calls, owners and journals in Redis. Owned by `RedisStore`; Lua scripts keep the rules of `transitions`.

Has two clients of its own, so that neither tokens nor waiting readers delay the worker registry: one for calls and
journals, and one with a connection for each waiting reader.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from baton.domain.ids import OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent
from baton.store import transitions
from baton.store.options import StoreOptions
from baton.store.redis import journal_codec, record_codec
from baton.store.redis.client import RedisClient, milliseconds
from baton.store.redis.keys import RedisKeys
from baton.store.store import CallRecord, CallStatus, JournalEntry, JournalPart, WriteOutcome

_Streams = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]
_RESUME = json.dumps(transitions.targets_by_event()[RequestEvent.RESUME])
_PLACEHOLDER_FIELDS = ("state", "model", "num_prompt_tokens", "num_emitted", "failure_code")
_OUTCOMES = (WriteOutcome.DONE, WriteOutcome.SUPERSEDED, WriteOutcome.GAP)


class RedisCallStore:
    """The `CallStore` of a `RedisStore`."""

    def __init__(self, url: str, keys: RedisKeys, options: StoreOptions) -> None:
        self._keys = keys
        self._options = options
        self._retention_ms = milliseconds(options.retention_s)
        self._lease_ms = milliseconds(options.owner_ttl_s)
        self._client = RedisClient(
            url, max_connections=options.max_connections, timeout_s=options.timeout_s, binary=True
        )
        self._reader_client = RedisClient(
            url, max_connections=options.max_waiting_readers, timeout_s=options.timeout_s, binary=True
        )
        self._open, self._end, self._claim, self._renew_lease, self._list_orphans, self._write = (
            self._client.script(name)
            for name in ("open_call", "end_call", "claim_call", "renew_lease", "list_orphans", "write_journal")
        )

    async def open(self, record: CallRecord) -> bool:
        transitions.check_new_call(record)
        owner = record.owner
        keys = [self._keys.call(record.id), self._keys.owners, self._keys.calls_of(owner), self._keys.lease(owner)]
        fields = [part for field in record_codec.call_to_fields(record).items() for part in field]
        async with self._client.operation("open a call"):
            opened = await self._open(keys=keys, args=[record.id, owner, self._retention_ms, self._lease_ms, *fields])
        return bool(opened)

    async def end(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        transitions.check_end_status(id, status)
        async with self._client.operation("end a call"):
            ended = await self._end(
                keys=[self._keys.call(id)],
                args=[id, epoch, status.value, self._retention_ms, self._keys.calls_of(OwnerId(""))],
            )
        return bool(ended)

    async def get(self, id: RequestId) -> CallRecord | None:
        async with self._client.operation("get a call"):
            fields = cast("dict[bytes, bytes]", await self._client.redis.hgetall(self._keys.call(id)))
        return record_codec.call_from_fields(fields) if fields else None

    async def claim(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        names = [self._keys.calls_of(OwnerId("")), self._keys.sequence(RequestId(""))]
        router_id = transitions.router_of(owner)
        first = record_codec.sequence_to_fields(transitions.placeholder(RequestId(""), router_id, epoch + 1))
        missing = json.dumps([part for name in _PLACEHOLDER_FIELDS for part in (name, first[name])])
        async with self._client.operation("claim a call"):
            flat = await self._claim(
                keys=[self._keys.call(id), self._keys.owners],
                args=[
                    *(id, epoch, owner, router_id, self._retention_ms),
                    *names,
                    *(_RESUME, first["attempt"], missing),
                ],
            )
        return record_codec.call_from_fields(_pairs(flat)) if flat else None

    async def renew_lease(self, owner: OwnerId) -> None:
        async with self._client.operation("hold calls"):
            await self._renew_lease(keys=[self._keys.lease(owner)], args=[self._lease_ms])

    async def release_lease(self, owner: OwnerId) -> None:
        async with self._client.operation("let calls go"):
            await self._client.redis.delete(self._keys.lease(owner))

    async def list_orphans(self) -> list[CallRecord]:
        names = [self._keys.lease(OwnerId("")), self._keys.calls_of(OwnerId("")), self._keys.call(RequestId(""))]
        async with self._client.operation("find orphans"):
            found = await self._list_orphans(keys=[self._keys.owners], args=[*names, self._options.max_orphans])
        return [call for flat in found if (call := record_codec.try_call_from_fields(_pairs(flat)))]

    async def write(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        keys: list[str] = []
        args: list[int | bytes] = [self._retention_ms]
        for entry in entries:
            keys += (self._keys.sequence(entry.id.request_id), self._keys.journal(entry.id.request_id))
            args += _arguments(entry)
        if not entries:
            return []
        async with self._client.operation("write tokens"):
            outcomes = cast("list[int]", await self._write(keys=keys, args=args))
        return [_OUTCOMES[outcome] for outcome in outcomes]

    async def read(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        key = self._keys.journal(id)
        block = milliseconds(wait_s) if wait_s > 0 else None
        async with self._reader_client.operation("read tokens", wait_s):
            found = cast("_Streams", await self._reader_client.redis.xread({key: f"{start}-0"}, block=block))
        entries = found[0][1] if found else []
        return journal_codec.part_from_payloads([fields[b"d"] for _, fields in entries], start)

    async def close(self) -> None:
        await self._client.close()
        await self._reader_client.close()


def _arguments(entry: JournalEntry) -> tuple[int | bytes, ...]:
    """What the script takes of an entry. One without tokens is in order wherever the journal ends."""
    transitions.check_entry(entry)
    first, last = (entry.tokens[0].index, entry.tokens[-1].index + 1) if entry.tokens else (0, 0)
    return entry.id.attempt, first, last, int(entry.ends), journal_codec.payload_from_entry(entry)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
