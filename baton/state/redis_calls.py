"""Calls, owners and journals in Redis. Owned by `RedisBook`; the rules are those of `ledger`, kept inside Lua scripts.

Two lines of its own, so that neither tokens nor those who wait for them stand in the registry's way: one for calls and
journals, and one with a connection for each reader that waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from baton.domain.ids import OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent
from baton.state import codec, journal_codec, ledger
from baton.state.base import CallRecord, CallStatus, JournalEntry, JournalPart, Written
from baton.state.keys import Keys
from baton.state.line import Line, milliseconds
from baton.state.options import BookOptions

_Streams = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]
_RESUME = json.dumps(ledger.columns()[RequestEvent.RESUME])
_OF_ANY_JOB = ("state", "model", "num_prompt_tokens", "num_emitted", "failure_code")
_OUTCOMES = (Written.DONE, Written.SUPERSEDED, Written.GAP)


class RedisCalls:
    """The `CallStore` of a `RedisBook`."""

    def __init__(self, url: str, keys: Keys, options: BookOptions) -> None:
        self._keys = keys
        self._options = options
        self._retention_ms = milliseconds(options.retention_s)
        self._lease_ms = milliseconds(options.owner_ttl_s)
        self._line = Line(url, max_connections=options.max_connections, timeout_s=options.timeout_s, binary=True)
        self._followers = Line(url, max_connections=options.max_followers, timeout_s=options.timeout_s, binary=True)
        self._open, self._end, self._claim, self._hold, self._orphans, self._write = (
            self._line.script(name)
            for name in ("open_call", "end_call", "claim_call", "hold", "orphans", "write_journal")
        )

    async def open(self, record: CallRecord) -> bool:
        ledger.check_opened(record)
        owner = record.owner
        keys = [self._keys.call(record.id), self._keys.owners, self._keys.calls_of(owner), self._keys.lease(owner)]
        fields = [part for field in codec.call_to_fields(record).items() for part in field]
        async with self._line.answering("open a call"):
            opened = await self._open(keys=keys, args=[record.id, owner, self._retention_ms, self._lease_ms, *fields])
        return bool(opened)

    async def end(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        ledger.check_ended(id, status)
        async with self._line.answering("end a call"):
            ended = await self._end(
                keys=[self._keys.call(id)],
                args=[id, epoch, status.value, self._retention_ms, self._keys.calls_of(OwnerId(""))],
            )
        return bool(ended)

    async def get(self, id: RequestId) -> CallRecord | None:
        async with self._line.answering("get a call"):
            fields = cast("dict[bytes, bytes]", await self._line.redis.hgetall(self._keys.call(id)))
        return codec.call_from_fields(fields) if fields else None

    async def claim(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        names = [self._keys.calls_of(OwnerId("")), self._keys.request(RequestId(""))]
        router_id = ledger.router_of(owner)
        first = codec.request_to_fields(ledger.placeholder(RequestId(""), router_id, epoch + 1))
        missing = json.dumps([part for name in _OF_ANY_JOB for part in (name, first[name])])
        async with self._line.answering("claim a call"):
            flat = await self._claim(
                keys=[self._keys.call(id), self._keys.owners],
                args=[
                    *(id, epoch, owner, router_id, self._retention_ms),
                    *names,
                    *(_RESUME, first["attempt"], missing),
                ],
            )
        return codec.call_from_fields(_pairs(flat)) if flat else None

    async def hold(self, owner: OwnerId) -> None:
        async with self._line.answering("hold calls"):
            await self._hold(keys=[self._keys.lease(owner)], args=[self._lease_ms])

    async def let_go(self, owner: OwnerId) -> None:
        async with self._line.answering("let calls go"):
            await self._line.redis.delete(self._keys.lease(owner))

    async def orphans(self) -> list[CallRecord]:
        names = [self._keys.lease(OwnerId("")), self._keys.calls_of(OwnerId("")), self._keys.call(RequestId(""))]
        async with self._line.answering("find orphans"):
            found = await self._orphans(keys=[self._keys.owners], args=[*names, self._options.max_orphans])
        return [call for flat in found if (call := codec.readable_call(_pairs(flat)))]

    async def write(self, entries: Sequence[JournalEntry]) -> list[Written]:
        keys: list[str] = []
        args: list[int | bytes] = [self._retention_ms]
        for entry in entries:
            keys += (self._keys.request(entry.id.request_id), self._keys.journal(entry.id.request_id))
            args += _arguments(entry)
        if not entries:
            return []
        async with self._line.answering("write tokens"):
            outcomes = cast("list[int]", await self._write(keys=keys, args=args))
        return [_OUTCOMES[outcome] for outcome in outcomes]

    async def read(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        key = self._keys.journal(id)
        block = milliseconds(wait_s) if wait_s > 0 else None
        async with self._followers.answering("read tokens", wait_s):
            found = cast("_Streams", await self._followers.redis.xread({key: f"{start}-0"}, block=block))
        entries = found[0][1] if found else []
        return journal_codec.part_from_payloads([fields[b"d"] for _, fields in entries], start)

    async def close(self) -> None:
        await self._line.close()
        await self._followers.close()


def _arguments(entry: JournalEntry) -> tuple[int | bytes, ...]:
    """What the script takes of an entry. One without tokens is in order wherever the journal ends."""
    ledger.check_entry(entry)
    first, last = (entry.tokens[0].index, entry.tokens[-1].index + 1) if entry.tokens else (0, 0)
    return entry.id.attempt, first, last, int(entry.ends), journal_codec.payload_from_entry(entry)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
