"""Keys, arguments and replies of the scripts that write calls, sequences and journals. Knows no connection.

`RedisStore` runs them one by one, or several together (`write_chains.lua`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from baton.domain.ids import ATTEMPTS_PER_EPOCH, OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.store import transitions
from baton.store.options import StoreOptions
from baton.store.redis.client import milliseconds
from baton.store.redis.journal_codec import JournalFormat
from baton.store.redis.keys import RedisKeys
from baton.store.redis.record_codec import RecordFormat
from baton.store.store import CallOwner, CallStatus, SequenceRecord, WriteOutcome
from baton.store.write_chain import (
    AdvanceSequence,
    ChainedWrite,
    EndCall,
    PutCall,
    PutSequence,
    WriteJournal,
    WriteResult,
)

Argument = str | int | bytes
_TARGETS = transitions.targets_by_event()
RESUME_COLUMN = json.dumps(_TARGETS[RequestEvent.RESUME])
TERMINAL_STATES = json.dumps({state.value: True for state in RequestState if state.terminal})
_STATUSES = {status.value.encode(): status for status in CallStatus}
_OUTCOMES = (WriteOutcome.DONE, WriteOutcome.SUPERSEDED, WriteOutcome.GAP)


class WriteCommand(msgspec.Struct, frozen=True):
    """One run of `script`. `read` makes a result of `(accepted, reply)`, a binary reply."""

    script: str
    keys: list[str]
    args: list[Argument]
    read: Callable[[bool, Any], WriteResult]


class WriteCommands:
    """Makes the commands of one store."""

    def __init__(self, keys: RedisKeys, records: RecordFormat, journals: JournalFormat, options: StoreOptions) -> None:
        self._owners = keys.owners  # keys and beginnings of keys: each write has several
        self._sequence, self._journal = keys.sequence(RequestId("")), keys.journal(RequestId(""))
        self._call, self._calls_of = keys.call(RequestId("")), keys.calls_of(OwnerId(""))
        self._lease = keys.lease(OwnerId(""))
        self._records = records
        self._journals = journals
        self._retention_ms = milliseconds(options.retention_s)
        self._lease_ms = milliseconds(options.owner_ttl_s)
        self._tombstone_ms = milliseconds(options.tombstone_s)
        self._makers: dict[type[ChainedWrite], Callable[[Any], WriteCommand]] = {
            PutCall: self.put_call, PutSequence: self.put_sequence, AdvanceSequence: self.advance,
            WriteJournal: self.write_journal, EndCall: self.end_call,
        }  # fmt: skip

    def of(self, write: ChainedWrite) -> WriteCommand:
        """The command of a write. Raises `Broken` for one that no store takes."""
        return self._makers[type(write)](write)

    def put_call(self, write: PutCall) -> WriteCommand:
        record = write.record
        transitions.check_new_call(record)
        args: list[Argument] = [
            *(record.id, record.owner, record.epoch, record.owner_tag),
            *(self._retention_ms, self._lease_ms, self._calls_of),
            *self._records.call_fields(record),
        ]
        owner = record.owner
        names = [self._call + record.id, self._owners, self._calls_of + owner, self._lease + owner]
        return WriteCommand("put_call", names, args, lambda ok, reply: WriteResult(ok, owner=call_owner(reply)))

    def put_sequence(self, write: PutSequence) -> WriteCommand:
        record = write.record
        args: list[Argument] = [
            *(self._retention_ms, record.attempt, record.owner_tag, ATTEMPTS_PER_EPOCH, record.router_id),
            *(record.num_emitted, TERMINAL_STATES),
            *self._records.sequence_fields(record),
        ]

        def read(ok: bool, reply: Any) -> WriteResult:
            return WriteResult(ok, record=self.stored_sequence(record, reply))

        return WriteCommand("put_request", [self._sequence + record.id], args, read)

    def stored_sequence(self, record: SequenceRecord, reply: int | list[bytes]) -> SequenceRecord:
        """The record that the store has after `put_request` of `record`."""
        if isinstance(reply, int):
            return record if reply == record.num_emitted else replace(record, num_emitted=reply)
        return self._records.sequence(record.id, pairs(reply)) or record

    def advance(self, write: AdvanceSequence) -> WriteCommand:
        id = write.attempt
        args: list[Argument] = [
            *(id.attempt, _events_to_json(write.events), write.num_emitted, write.failure_code, self._retention_ms),
            self._records.fingerprint(id.request_id, write.fingerprint) if write.fingerprint else b"",
            *(id.owner_tag, ATTEMPTS_PER_EPOCH),
        ]
        return WriteCommand("advance_sequence", [self._sequence + id.request_id], args, _accepted_only)

    def write_journal(self, write: WriteJournal) -> WriteCommand:
        keys: list[str] = []
        args: list[Argument] = [self._retention_ms, ATTEMPTS_PER_EPOCH, RESUME_COLUMN]
        for entry in write.entries:
            id, end = entry.id.request_id, entry.first + len(entry.tokens)
            first, end = (entry.first, end) if entry.tokens else (0, 0)  # without tokens: in order anywhere
            keys += (self._sequence + id, self._journal + id)
            ends = entry.finish is not None or entry.failure_code != ""
            args += (entry.id.attempt, entry.id.owner_tag, first, end, int(ends))
            args.append(self._journals.payload(entry))
        return WriteCommand("write_journal", keys, args, _read_outcomes)

    def end_call(self, write: EndCall) -> WriteCommand:
        id, status = write.id, write.status
        transitions.check_call_end(id, status, write.trace)
        ended = status is CallStatus.ENDED
        args: list[Argument] = [
            *(id, *write.ballot, status._value_, self._retention_ms, self._calls_of),
            *(self._records.trace(id, write.trace), self._tombstone_ms),
            *(msgspec.json.encode(write.ended_sequences), self._sequence, TERMINAL_STATES),
            *(self._records.tombstone_fields(id, write.ballot) if ended else ()),
        ]
        return WriteCommand("end_call", [self._call + id], args, _accepted_only)


def call_owner(reply: Sequence[Any]) -> CallOwner:
    """The reply of `put_call`. A status that is none, which a stranger may have written, counts as open."""
    owner, epoch, tag, status = reply
    known = _STATUSES.get(status, CallStatus.OPEN)
    return CallOwner(OwnerId(owner.decode(errors="replace")), (epoch, tag), known)


def journal_outcomes(reply: Sequence[int]) -> list[WriteOutcome]:
    """The reply of `write_journal`."""
    return list(map(_OUTCOMES.__getitem__, reply))


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """A hash from its fields and values in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def chains_to_args(chains: Sequence[Sequence[WriteCommand]]) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of `write_chains`."""
    head, keys, args = list[tuple[str, int, int, int]](), list[str](), list[Argument]()
    for number, chain in enumerate(chains, 1):
        for command in chain:
            head.append((command.script, number, len(command.keys), len(command.args)))
            keys += command.keys
            args += command.args
    return keys, [msgspec.json.encode(head), *args]


def read_chains(chains: Sequence[Sequence[WriteCommand]], reply: Sequence[Any]) -> list[list[WriteResult]]:
    """Results of the writes that ran, by chain."""
    results, answers = list[list[WriteResult]](), iter(reply)
    for chain in chains:
        results.append([])
        for command in chain:
            if answer := next(answers):
                results[-1].append(command.read(bool(answer[0]), answer[1]))
    return results


def _read_outcomes(accepted: bool, reply: Sequence[int]) -> WriteResult:
    return WriteResult(accepted, outcomes=tuple(map(_OUTCOMES.__getitem__, reply)))


def _accepted_only(accepted: bool, reply: object) -> WriteResult:
    return WriteResult(accepted)


@functools.lru_cache(maxsize=1024)
def _events_to_json(events: tuple[RequestEvent, ...]) -> str:
    """Encodes events for the script: attempts that each opens, and its column of the table."""
    return json.dumps([(transitions.NUM_ATTEMPTS_OPENED[event], _TARGETS[event]) for event in events])
