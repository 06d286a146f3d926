"""Sequences, calls, owners and journals of a `MemoryStore`.

Lifetimes run on the injected clock, in seconds; a reader that waits for tokens waits on the running loop's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from baton.domain.ids import AttemptId, Ballot, OwnerId, RequestId, owner_tag
from baton.domain.request import FinishReason, OutputToken
from baton.store import transitions
from baton.store.notifier import wait_for_event
from baton.store.options import StoreOptions
from baton.store.store import (
    NO_BALLOT,
    CallOwner,
    CallRecord,
    CallStatus,
    JournalEntry,
    JournalPart,
    LeaseState,
    LiveSequence,
    SequenceRecord,
    WriteOutcome,
)


@dataclass(frozen=True, slots=True)
class _StoredSequence:
    record: SequenceRecord
    expires_at: float


class SequenceTable:
    """Sequence records until they expire."""

    def __init__(self, retention_s: float, clock: Callable[[], float]) -> None:
        self._retention_s = retention_s
        self._clock = clock
        self._stored: dict[RequestId, _StoredSequence] = {}  # ordered by expiry: every write moves to the end

    def get(self, id: RequestId) -> SequenceRecord | None:
        """Returns the record, or None when it is unknown or past its retention."""
        stored = self._stored.get(id)
        return stored.record if stored and self._clock() < stored.expires_at else None

    def put(self, record: SequenceRecord) -> None:
        """Stores a record for one retention, and drops expired ones."""
        now = self._clock()
        self._stored.pop(record.id, None)
        self._stored[record.id] = _StoredSequence(record, now + self._retention_s)
        while (oldest := next(iter(self._stored.values()))).expires_at <= now:
            del self._stored[oldest.record.id]


@dataclass(frozen=True, slots=True)
class _StoredCall:
    """`opened`: its place in the order in which calls were entered."""

    record: CallRecord
    expires_at: float
    opened: int


@dataclass(frozen=True, slots=True)
class _Lease:
    number: int
    expires_at: float


_NO_LEASE = _Lease(0, 0.0)


@dataclass(slots=True)
class _Journal:
    tokens: list[OutputToken] = field(default_factory=list)
    writers: list[AttemptId] = field(default_factory=list)  # of each token
    last_writer: AttemptId | None = None
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    failure_code: str = ""
    expires_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.finish is not None or bool(self.failure_code)

    def has_more(self, start: int) -> bool:
        return len(self.tokens) > start or (self.ended and len(self.tokens) == start)


class MemoryCallStore:
    """The `CallStore` of a `MemoryStore`, which checks that it is open before it calls here."""

    def __init__(self, sequences: SequenceTable, options: StoreOptions, clock: Callable[[], float]) -> None:
        self._sequences = sequences
        self._options = options
        self._clock = clock
        self._calls: dict[RequestId, _StoredCall] = {}  # ordered by expiry: every write moves to the end
        self._open: set[RequestId] = set()
        self._num_opened = itertools.count()
        self._leases: dict[OwnerId, _Lease] = {}
        self._generation = secrets.token_hex(8)
        self._server = secrets.token_hex(8)
        self._journals: dict[RequestId, _Journal] = {}
        self._readers: dict[RequestId, set[asyncio.Event]] = {}
        self._closed = False

    def close(self) -> None:
        """Wakes every waiting reader."""
        self._closed = True
        for readers in self._readers.values():
            for changed in readers:
                changed.set()

    def put(self, record: CallRecord) -> CallOwner:
        transitions.check_new_call(record)
        self._expire()
        stored = self.get(record.id)
        if stored is not None and stored.ballot >= record.ballot:
            return transitions.owner_of(stored)
        self._put(record)
        if self._leases.get(record.owner, _NO_LEASE).expires_at <= self._clock():
            self.hold_lease(record.owner, 0)
        return transitions.owner_of(record)

    def end(
        self, id: RequestId, ballot: Ballot, status: CallStatus, trace: bytes, ended_sequences: Sequence[RequestId]
    ) -> bool:
        transitions.check_call_end(id, status, trace)
        call = self.get(id)
        if call is None and status is CallStatus.ENDED:
            self._put(transitions.tombstone(id, ballot), self._options.tombstone_s)
            return True
        if call is None or call.ballot > ballot:
            return False
        for sequence in ended_sequences:
            record = self._sequences.get(sequence)
            if record is not None and not record.state.terminal:
                raise LiveSequence(id, sequence)
        epoch, owner_tag = ballot
        self._put(replace(call, status=status, trace=trace or call.trace, epoch=epoch, owner_tag=owner_tag))
        return True

    def get(self, id: RequestId) -> CallRecord | None:
        stored = self._calls.get(id)
        return stored.record if stored and self._clock() < stored.expires_at else None

    def claim(
        self, id: RequestId, ballot: Ballot, owner: OwnerId, *, floor: int, seed: CallRecord | None
    ) -> CallRecord | None:
        stored = self.get(id)
        call = stored or seed
        if call is None or ballot != (stored.ballot if stored else NO_BALLOT):
            return None
        if stored is not None and stored.status is CallStatus.ENDED:
            return None
        router_id = transitions.router_of(owner)
        records = {sequence: self._sequences.get(sequence) for sequence in call.sequence_ids}
        epochs = [record.attempt_id.epoch for record in records.values() if record]
        epoch, tag = transitions.claimed_epoch([call.epoch, *epochs], floor), owner_tag(owner)
        for sequence, record in records.items():
            if record is None:
                self._sequences.put(transitions.placeholder(sequence, router_id, (epoch, tag)))
            elif resumed := transitions.apply_resume(record, router_id, (epoch, tag)):
                self._sequences.put(resumed)
        claimed = replace(call, owner=owner, epoch=epoch, owner_tag=tag, status=CallStatus.OPEN)
        self._put(claimed)
        return claimed

    def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        now = self._clock()
        held = self._leases.get(owner, _NO_LEASE)
        before = held.number if now < held.expires_at else 0
        self._leases[owner] = _Lease(max(number, before), now + self._options.owner_ttl_s)
        return LeaseState(self._generation, before, self._server)

    def release_lease(self, owner: OwnerId) -> None:
        self._leases.pop(owner, None)

    def list_orphans(self) -> list[CallRecord]:
        now = self._clock()
        self._expire()
        self._leases = {owner: lease for owner, lease in self._leases.items() if now < lease.expires_at}
        calls = (self._calls[id] for id in self._open if self._options.may_claim(self._calls[id].record.text_digest))
        orphans = sorted((c for c in calls if c.record.owner not in self._leases), key=lambda call: call.opened)
        return [call.record for call in orphans[: self._options.max_orphans]]

    def write(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        self._expire()
        return [self._write(entry) for entry in entries]

    async def read(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        with self._subscribed(id) as changed:
            if not self._journal(id).has_more(start):
                await self._wait_for_more(id, start, changed, wait_s)
        journal = self._journal(id)
        if not journal.has_more(start):
            return JournalPart((), 0, None, "")
        return JournalPart(
            tuple(journal.tokens[start:]), journal.num_cached_tokens, journal.finish, journal.failure_code,
            tuple(filter(None, (*journal.writers[start:], journal.last_writer))),
        )  # fmt: skip

    def _write(self, entry: JournalEntry) -> WriteOutcome:
        id = entry.id.request_id
        record = self._sequences.get(id)
        if record is None:
            return WriteOutcome.GAP
        if record.attempt_id.order > entry.id.order:
            return WriteOutcome.SUPERSEDED
        journal = self._journal(id)
        if entry.tokens and entry.first > len(journal.tokens):
            return WriteOutcome.GAP
        has_more = bool(entry.tokens) and entry.first + len(entry.tokens) > len(journal.tokens)
        if record.attempt_id != entry.id:
            self._sequences.put(transitions.after_journal_write(record, entry.id))
        if not journal.ended and (has_more or entry.finish is not None or entry.failure_code):
            self._append(journal, entry)
            self._journals.pop(id, None)
            self._journals[id] = journal
        return WriteOutcome.DONE

    def _append(self, journal: _Journal, entry: JournalEntry) -> None:
        logprobs = entry.logprobs or (None,) * len(entry.tokens)
        tokens = map(OutputToken, itertools.count(entry.first), entry.tokens, logprobs)
        journal.tokens.extend(itertools.islice(tokens, max(0, len(journal.tokens) - entry.first), None))
        journal.writers += [entry.id] * (len(journal.tokens) - len(journal.writers))
        journal.last_writer = entry.id
        journal.num_cached_tokens = entry.num_cached_tokens
        journal.finish, journal.failure_code = entry.finish, entry.failure_code
        journal.expires_at = self._clock() + self._options.retention_s
        for changed in self._readers.get(entry.id.request_id, ()):
            changed.set()

    @contextlib.contextmanager
    def _subscribed(self, id: RequestId) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        self._readers.setdefault(id, set()).add(changed)
        try:
            yield changed
        finally:
            self._readers[id].discard(changed)
            if not self._readers[id]:
                del self._readers[id]

    async def _wait_for_more(self, id: RequestId, start: int, changed: asyncio.Event, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while await wait_for_event(changed, max(0.0, deadline - loop.time())):
            changed.clear()
            if self._journal(id).has_more(start) or self._closed:
                return

    def _journal(self, id: RequestId) -> _Journal:
        journal = self._journals.get(id)
        return journal if journal and self._clock() < journal.expires_at else _Journal()

    def _put(self, record: CallRecord, retention_s: float | None = None) -> None:
        before = self._calls.pop(record.id, None)
        expires_at = self._clock() + (self._options.retention_s if retention_s is None else retention_s)
        is_known = before is not None and before.expires_at > self._clock()
        opened = before.opened if before is not None and is_known else next(self._num_opened)
        self._calls[record.id] = _StoredCall(record, expires_at, opened)
        if record.status is CallStatus.OPEN:
            self._open.add(record.id)
        else:
            self._open.discard(record.id)

    def _expire(self) -> None:
        """Drops records past their retention."""
        now = self._clock()
        while self._calls and (call := next(iter(self._calls.values()))).expires_at <= now:
            del self._calls[call.record.id]
            self._open.discard(call.record.id)
        while self._journals and (journal := next(iter(self._journals.items())))[1].expires_at <= now:
            del self._journals[journal[0]]
