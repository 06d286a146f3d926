"""Pending syncs and due journals, indexed by sequence id and call id, and their bounds. Pure bookkeeping.

Never drops a live sequence. Drops the oldest ended sequences and calls when they, or their tokens, are too many. Owned
by `StoreWriter`; knows no store and no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.domain.ids import RequestId
from baton.store.store import JournalEntry
from baton.store.write_behind.call_sync import CallSync
from baton.store.write_behind.record_sync import RecordSync

MAX_ENTRIES = 512
MAX_ENTRY_TOKENS = 4096
MAX_BATCH_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class JournalBatch:
    """Entries for one round trip, each with its sync. `complete`: nothing else was due that could be written."""

    syncs: tuple[RecordSync, ...]
    entries: tuple[JournalEntry, ...]
    complete: bool


class SyncQueue:
    """Syncs by the ids of their sequences and calls, and what of them waits."""

    def __init__(self, max_ended: int, max_ended_tokens: int) -> None:
        self._max_ended = max_ended
        self._max_ended_tokens = max_ended_tokens
        self._sequences: dict[RequestId, RecordSync] = {}
        self._calls: dict[RequestId, CallSync] = {}
        self._call_of: dict[RequestId, CallSync] = {}  # sequence id -> its open call
        self._waiting: dict[RecordSync | CallSync, None] = {}
        self._due_journals: dict[RecordSync, None] = {}  # whose journal has something to write
        self._ended: dict[RecordSync | CallSync, None] = {}  # not at rest, and ended
        self._num_ended_tokens = 0

    @property
    def num_pending(self) -> int:
        """Sequences and calls whose last change, or last token, is not in the store yet."""
        return len(self._waiting.keys() | self._due_journals.keys() | self._ended.keys())

    @property
    def empty(self) -> bool:
        """Whether everything is in the store."""
        return not (self._waiting or self._due_journals or self._ended)

    @property
    def over_limit(self) -> bool:
        """Whether `drop_oldest` must be called."""
        return len(self._ended) > self._max_ended or self._num_ended_tokens > self._max_ended_tokens

    @property
    def num_due_journals(self) -> int:
        """Sequences whose journal has something to write."""
        return len(self._due_journals)

    def sequence(self, id: RequestId) -> RecordSync | None:
        """The sequence's sync while it is live or not at rest."""
        return self._sequences.get(id)

    def call(self, id: RequestId) -> CallSync | None:
        """The call's sync while it is open or not at rest."""
        return self._calls.get(id)

    def next_sync(self) -> RecordSync | CallSync | None:
        """The one that has waited longest; it stays first in line until it is done."""
        return next(iter(self._waiting), None)

    def add_call(self, call: CallSync) -> None:
        """A call that is open here from now on: sequences that are added later belong to it by their ids."""
        self._calls[call.desired.id] = call
        self._call_of.update(dict.fromkeys(call.desired.sequence_ids, call))
        self.enqueue(call)

    def add_sequence(self, sync: RecordSync) -> None:
        """A sequence that is live here from now on. One whose call is not written is not journalled."""
        id = sync.desired.id
        sync.call = self._call_of.get(id)
        if sync.call is not None:
            sync.call.journals[id] = sync.journal
            if sync.call.status.given_up:
                sync.journal.close()
        self._sequences[id] = sync
        self.enqueue(sync)

    def enqueue(self, sync: RecordSync | CallSync) -> None:
        """Something about it has changed: it is queued, unless it waits there or for a journal."""
        if sync.ended and not sync.settled and sync not in self._ended:
            self._ended[sync] = None
            self._num_ended_tokens += _num_buffered(sync)
        if not sync.in_sync:
            self._waiting.setdefault(sync)
        if isinstance(sync, RecordSync) and sync.journal.due:
            self._due_journals.setdefault(sync)
        self.prune(sync)

    def prune(self, sync: RecordSync | CallSync) -> None:
        """Takes it off every list that it need not be on any more."""
        if sync.in_sync:
            self._waiting.pop(sync, None)
        if isinstance(sync, RecordSync) and not sync.journal.due:
            self._due_journals.pop(sync, None)
            self._requeue(sync)
        if sync.ended and sync.settled:
            self._remove(sync)

    def next_batch(self) -> JournalBatch:
        """The journal entries to write next, those that have waited longest first."""
        syncs, entries, num_tokens = list[RecordSync](), list[JournalEntry](), 0
        for sync in self._due_journals:
            if len(entries) == MAX_ENTRIES or num_tokens >= MAX_BATCH_TOKENS:
                return JournalBatch(tuple(syncs), tuple(entries), complete=False)
            entry = sync.next_entry(MAX_ENTRY_TOKENS)
            if entry is not None:
                syncs.append(sync)
                entries.append(entry)
                num_tokens += len(entry.tokens)
        is_complete = all(len(entry.tokens) < MAX_ENTRY_TOKENS for entry in entries)
        return JournalBatch(tuple(syncs), tuple(entries), complete=is_complete)

    def journal_written(self, sync: RecordSync, entry: JournalEntry) -> None:
        """The store holds the entry; what is left waits behind the others."""
        sync.journal.mark_written(entry)
        if self._due_journals.pop(sync, self) is not self and sync.journal.due:
            self._due_journals[sync] = None
        self.prune(sync)

    def drop_journal(self, sync: RecordSync) -> None:
        """Its journal is given up."""
        self._num_ended_tokens -= _num_buffered(sync) if sync in self._ended else 0
        sync.journal.close()
        self.prune(sync)

    def sequences_of(self, call: CallSync) -> list[RecordSync]:
        """The sequences of a call that are live or not at rest."""
        found = (self._sequences.get(id) for id in call.desired.sequence_ids)
        return [sync for sync in found if sync is not None and sync.call is call]

    def mark_stale(self, sync: RecordSync) -> None:
        """The store has lost its journal, so it may have lost its record and its call."""
        for each in (sync.call, sync):
            if each is not None and not each.status.given_up:
                each.status.stale = True
                self.enqueue(each)

    def mark_live_stale(self) -> None:
        """The store may have lost what it held of the living: each of them looks again."""
        for sync in self._live():
            sync.status.stale = True
            self.enqueue(sync)

    def drop_oldest(self) -> RequestId:
        """Drops what ended first; returns its id."""
        sync = next(iter(self._ended))
        self._waiting.pop(sync, None)
        if isinstance(sync, RecordSync):
            self._due_journals.pop(sync, None)
        self._remove(sync)
        if isinstance(sync, RecordSync):
            sync.journal.close()
            self._requeue(sync)
        return sync.desired.id

    def _requeue(self, sync: RecordSync) -> None:
        """Its journal is written, or given up: what waited for that may go on."""
        for waiting in (sync, sync.call):
            if waiting is not None and not waiting.in_sync and waiting in self._ended:
                self._waiting.setdefault(waiting)

    def _remove(self, sync: RecordSync | CallSync) -> None:
        if sync in self._ended:
            del self._ended[sync]
            self._num_ended_tokens -= _num_buffered(sync)
        if isinstance(sync, RecordSync):
            if self._sequences.get(sync.desired.id) is sync:
                del self._sequences[sync.desired.id]
        else:
            if self._calls.get(sync.desired.id) is sync:
                del self._calls[sync.desired.id]
            for id in sync.desired.sequence_ids:
                if self._call_of.get(id) is sync:
                    del self._call_of[id]

    def _live(self) -> Iterator[RecordSync | CallSync]:
        everyone: list[RecordSync | CallSync] = [*self._calls.values(), *self._sequences.values()]
        return (sync for sync in everyone if not sync.ended and not sync.status.given_up)


def _num_buffered(sync: RecordSync | CallSync) -> int:
    return sync.journal.num_buffered if isinstance(sync, RecordSync) else 0
