"""Pending syncs and due journals, indexed by sequence id and call id, and their bounds. Pure bookkeeping.

Never drops a live sequence. Drops the oldest ended sequences and calls when they, or their tokens, are too many. Keeps
the last ones that are written as well: a store that is rolled back shows them as live again. Owned by `StoreWriter`;
knows no store and no time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from operator import attrgetter

from baton.domain.ids import RequestId
from baton.store.store import JournalEntry
from baton.store.write_behind.call_sync import CallSync, changed_call
from baton.store.write_behind.journal_buffer import MAX_ENTRY_TOKENS
from baton.store.write_behind.planned_write import PlannedWrite
from baton.store.write_behind.record_sync import RecordSync
from baton.store.write_behind.sync_status import SyncPhase
from baton.store.write_behind.write_batch import NO_JOURNALS, JournalBatch, WriteBatch
from baton.store.write_chain import EndCall, PutCall, WriteJournal

_WRITE, _HOLD, _, _DONE = SyncPhase  # reading a member of an enum takes as long as a call

MAX_ENTRIES = 512
MAX_CHAINED_WRITES = 256
"""Most writes of records in one round trip, but for the last call's."""
MAX_BATCH_TOKENS = 32_768
MAX_BATCH_BYTES = 1 << 20
"""Most bytes of calls' bodies in one round trip, but for the last call's: it must end within the store's timeout."""
MAX_WRITTEN = 10_000
"""Most sequences and calls whose end is written that are kept for a store that is rolled back."""
MAX_WRITTEN_TOKENS = 1 << 18


class SyncQueue:
    """`sequences` and `calls` are those that are live or not written; `due_journals` in the order of their turns."""

    def __init__(self, max_ended: int, max_ended_tokens: int) -> None:
        self.sequences: dict[RequestId, RecordSync] = {}
        self.calls: dict[RequestId, CallSync] = {}
        self.due_journals: dict[RecordSync, None] = {}
        self._max_ended = max_ended
        self._max_ended_tokens = max_ended_tokens
        self._call_of: dict[RequestId, CallSync] = {}  # sequence id -> its open call
        self._waiting: dict[RecordSync | CallSync, None] = {}  # records to write at once, in order
        self._rechecks: dict[RecordSync | CallSync, None] = {}  # written to the end, and perhaps lost since; in order
        self._held: dict[RecordSync | CallSync, None] = {}  # records to write with the next journals, in order
        self._ended: dict[RecordSync | CallSync, int] = {}  # ended, and not written to the end -> tokens kept for it
        self._num_ended_tokens = 0
        self._written: dict[RecordSync | CallSync, int] = {}  # written to the end -> tokens kept for it
        self._num_written_tokens = 0
        self.num_resets = 0

    @property
    def num_pending(self) -> int:
        """Sequences and calls whose last change, or last token, is not in the store yet."""
        waiting = self._waiting.keys() | self._rechecks.keys() | self._held.keys()
        return len(waiting | self.due_journals.keys() | self._ended.keys())

    @property
    def empty(self) -> bool:
        """Everything is in the store."""
        return not (self._waiting or self._rechecks or self._held or self.due_journals or self._ended)

    @property
    def has_due(self) -> bool:
        """There is something for the next flush of journals."""
        return bool(self.due_journals or self._held)

    @property
    def lags(self) -> bool:
        """The store lacks a record that cannot wait. It may have lost others, which it has had to their ends."""
        return bool(self._waiting)

    @property
    def has_at_once(self) -> bool:
        """There is a record that cannot wait for the next journals: `next_sync` has one."""
        return bool(self._waiting or self._rechecks)

    @property
    def over_limit(self) -> bool:
        """`drop_oldest` must be called."""
        return len(self._ended) > self._max_ended or self._num_ended_tokens > self._max_ended_tokens

    def next_sync(self) -> RecordSync | CallSync | None:
        """The sync that has waited longest, of those whose record cannot wait for the next journals.

        It stays first until its record is written or the store fails. A call goes before its own, and what the store
        has not had before what it may have lost: after a reset, thousands of ended records are read one by one.
        """
        sync = next(iter(self._waiting), None) or next(iter(self._rechecks), None)
        return sync and self._call_first(sync)

    def next_urgent(self) -> RecordSync | CallSync | None:
        """As `next_sync`, of those that do not wait for others to be opened with them."""
        sync = next(filter(self.is_urgent, itertools.chain(self._waiting, self._rechecks)), None)
        return sync and self._call_first(sync)

    def _call_first(self, sync: RecordSync | CallSync) -> RecordSync | CallSync:
        if isinstance(sync, RecordSync) and (sync.call in self._waiting or sync.call in self._rechecks):
            return sync.call or sync
        return sync

    def is_urgent(self, sync: RecordSync | CallSync) -> bool:
        """True if its record cannot wait, and is none of a new call."""
        if sync not in self._waiting and sync not in self._rechecks:
            return False
        if isinstance(sync, CallSync):
            return sync.ended or sync.stored is not None or sync.status.alone
        return not self.opens_call(sync)

    def opens_call(self, sync: RecordSync | CallSync) -> bool:
        """True for a sequence that has its workers before the store has had its call: both are written together.

        The call is durable only then, which its response waits for.
        """
        call = sync.call if isinstance(sync, RecordSync) else None
        if call is None or call.stored is not None or call.ended or sync.stored is not None or sync.ended:
            return False
        of_call, status = call.status, sync.status
        if of_call.given_up or of_call.stale or of_call.refused:
            return False
        return (status.given_up or not (status.stale or status.refused)) and sync in self._waiting

    def holds(self, sync: RecordSync | CallSync) -> bool:
        """True if a write of its record is due."""
        return sync in self._held or sync in self._waiting or sync in self._rechecks

    def add_call(self, call: CallSync) -> None:
        """Adds an open call. Sequences that are added later belong to it by their ids."""
        self.calls[call.desired.id] = call
        self._call_of.update(dict.fromkeys(call.desired.sequence_ids, call))
        self.update(call)

    def add_sequence(self, sync: RecordSync) -> None:
        """Adds a live sequence. One whose call is not written is not journalled."""
        id = sync.desired.id
        sync.call = self._call_of.get(id)
        if sync.call is not None:
            sync.call.sequences[id] = sync
            if sync.call.status.given_up:
                sync.journal.close()
        self.sequences[id] = sync
        self.update(sync)

    def update(self, sync: RecordSync | CallSync) -> None:
        """Puts a changed sync where its phase requires, and the ended call that waits for its journal."""
        phase, held = sync.phase, self._held
        at_once = self._rechecks if sync.was_written else self._waiting
        if phase is _WRITE:
            if sync not in at_once:
                at_once[sync] = None
        elif sync in at_once:
            del at_once[sync]
        if phase is _HOLD:
            if sync not in held:
                held[sync] = None
        elif sync in held:
            del held[sync]
        if isinstance(sync, RecordSync):
            if sync.journal.due:
                if sync not in self.due_journals:
                    self.due_journals[sync] = None
            else:
                if sync in self.due_journals:
                    del self.due_journals[sync]
                if sync.call in self._ended:
                    self.update(sync.call)
        if not sync.ended:
            return
        if phase is _DONE:
            self._remove(sync)
        elif sync not in self._ended:
            self._ended[sync] = sync.journal.num_buffered if isinstance(sync, RecordSync) else 0
            self._num_ended_tokens += self._ended[sync]

    def put_last(self, sync: RecordSync | CallSync) -> None:
        """Lets the others go first: the store failed at this one, and may take theirs.

        The sequences of a call go with it: they have to wait for it.
        """
        family = [sync, *sync.sequences.values()] if isinstance(sync, CallSync) else [sync]
        for each in family:
            for syncs in (self._waiting, self._rechecks):
                if each in syncs:
                    syncs[each] = syncs.pop(each)

    def next_batch(self, *, due: bool, journals_alone: bool = False) -> WriteBatch:
        """The writes for one round trip: of records that cannot wait and, if `due`, of all others and of journals.

        Not of syncs whose next write is alone. `journals_alone`: of journals only.
        """
        if journals_alone:
            journals = self._next_journals(set(), 0)
            return WriteBatch((), journals, complete=False)
        waiting = itertools.chain(self._waiting, self._rechecks)
        if due:
            waiting = itertools.chain(waiting, self._held, filter(attrgetter("ended"), self.due_journals))
        chains, planned, num_writes, complete = list[list[PlannedWrite]](), set[RecordSync | CallSync](), 0, True
        leaves_chains = False
        num_tokens = num_bytes = 0
        roots = set[RecordSync | CallSync]()
        for sync in waiting:  # only as far as this round trip goes: thousands may wait
            root = self._root(sync)
            if root in roots:
                continue
            if num_writes >= MAX_CHAINED_WRITES or num_tokens >= MAX_BATCH_TOKENS or num_bytes >= MAX_BATCH_BYTES:
                leaves_chains = True
                break
            roots.add(root)
            chain = self._chain(root)
            if chain:
                chains.append(chain)
                planned.update(map(attrgetter("sync"), chain))
                num_writes += len(chain)
                for planned_write in chain:
                    write = planned_write.write
                    if isinstance(write, WriteJournal):
                        num_entry_tokens = len(write.entries[0].tokens)
                        num_tokens += num_entry_tokens
                        complete = complete and num_entry_tokens < MAX_ENTRY_TOKENS  # else more of it may be due
                    elif isinstance(write, PutCall):
                        num_bytes += len(write.record.body)
        chains.sort(key=_needs_no_memory)
        journals = self._next_journals(planned, num_tokens) if due else NO_JOURNALS
        complete = complete and journals.complete and not leaves_chains
        return WriteBatch(tuple(chains), journals, complete, leaves_chains)

    def _root(self, sync: RecordSync | CallSync) -> RecordSync | CallSync:
        """The call whose chain has the writes of `sync`; the sync itself if it is written without a call."""
        call = sync.call if isinstance(sync, RecordSync) else None
        if call is None or self.calls.get(call.desired.id) is not call or call.status.given_up:
            return sync
        return call if call.sequences.get(sync.desired.id) is sync else sync

    @staticmethod
    def _chain(root: RecordSync | CallSync) -> list[PlannedWrite]:
        if root.status.alone:
            return []
        if isinstance(root, CallSync):
            return root.plan()
        call = root.call
        return root.plan(call_stored=call is None or (call.stored is not None and not call.status.stale))[0]

    def _next_journals(self, planned: set[RecordSync | CallSync], num_tokens: int) -> JournalBatch:
        """The journal entries to write next but those of `planned`, those that have waited longest first.

        `num_tokens`: those that the round trip has already.
        """
        syncs, entries, complete = list[RecordSync](), list[JournalEntry](), True
        for sync in self.due_journals:
            if len(entries) == MAX_ENTRIES or num_tokens >= MAX_BATCH_TOKENS:
                complete = False
                break
            if sync in planned:
                continue
            entry = sync.next_entry(MAX_ENTRY_TOKENS)
            if entry is not None:
                syncs.append(sync)
                entries.append(entry)
                num_tokens += len(entry.tokens)
                complete = complete and len(entry.tokens) < MAX_ENTRY_TOKENS
        return JournalBatch(tuple(syncs), tuple(entries), complete)

    def doubt(self, chains: Iterable[list[PlannedWrite]]) -> None:
        """The store may have run any part of these chains: what they wrote is read."""
        for sync in dict.fromkeys(planned.sync for chain in chains for planned in chain):
            sync.status.stale = True
            self.update(sync)

    def journal_written(self, sync: RecordSync, entry: JournalEntry) -> None:
        """The store has the entry; what is left waits behind the others."""
        self.note_written(sync, entry)
        self.update(sync)

    def note_written(self, sync: RecordSync, entry: JournalEntry) -> None:
        """As `journal_written`, before an `update` of the caller's own."""
        ends = entry.finish is not None or entry.failure_code != ""
        sync.journal.mark_written(entry.first + len(entry.tokens), ends=ends)
        self.due_journals.pop(sync, None)

    def drop_journal(self, sync: RecordSync) -> None:
        """Gives its journal up."""
        if sync in self._ended:
            self._num_ended_tokens -= self._ended[sync]
            self._ended[sync] = 0
        sync.journal.close()
        self.update(sync)

    def detach(self, sync: RecordSync) -> None:
        """Lets a sequence be written without its call."""
        sync.call = None
        self.update(sync)

    def sequences_of(self, call: CallSync) -> list[RecordSync]:
        """The sequences of a call that are live or not written."""
        found = (self.sequences.get(id) for id in call.desired.sequence_ids)
        return [sync for sync in found if sync is not None and sync.call is call]

    def mark_stale(self, sync: RecordSync) -> None:
        """The store has lost its journal, so perhaps its record and its call as well."""
        for each in (sync.call, sync):
            if each is not None and not each.status.given_up:
                each.status.stale = True
                self.update(each)

    def recheck_sequences(self, call: CallSync) -> None:
        """The store has lost ends of sequences: those of the call are read again, the written ones as well."""
        for sync in [*self._written, *self.sequences_of(call)]:
            if isinstance(sync, RecordSync) and sync.call is call and not sync.status.given_up:
                if sync in self._written:
                    self._revive(sync)
                sync.status.stale = True
                self.update(sync)

    def mark_live_stale(self) -> None:
        """The store may have lost live sequences and calls: each is read again."""
        live: list[RecordSync | CallSync] = [*self.calls.values(), *self.sequences.values()]
        for sync in live:
            if not sync.ended and not sync.status.given_up:
                sync.status.stale = True
                self.update(sync)

    def mark_reset(self) -> None:
        """The store may have lost all that it had: everything, and the last ends, are put again."""
        self.num_resets += 1
        for written in reversed(list(self._written)):
            self._revive(written)
        syncs: list[RecordSync | CallSync] = [*self.calls.values(), *self.sequences.values()]
        for sync in syncs:
            self.reset(sync)

    def reset(self, sync: RecordSync | CallSync) -> None:
        """The store may have lost what it had of this sync."""
        if not sync.status.given_up:
            sync.mark_reset()
        self.update(sync)

    def drop_oldest(self) -> RequestId:
        """Drops what ended first; returns its id."""
        sync = next(iter(self._ended))
        sync.status.given_up = True
        if isinstance(sync, RecordSync):
            sync.journal.close()
        self.update(sync)
        return sync.desired.id

    def _remove(self, sync: RecordSync | CallSync) -> None:
        id = sync.desired.id
        self._num_ended_tokens -= self._ended.pop(sync, 0)
        if self.sequences.get(id) is sync:
            del self.sequences[id]
        if self.calls.get(id) is sync:
            for sequence_id in self.calls.pop(id).desired.sequence_ids:
                self._call_of.pop(sequence_id, None)
        if not sync.status.given_up:
            self._keep_written(sync)
        elif isinstance(sync, CallSync):
            sync.sequences.clear()

    def _keep_written(self, sync: RecordSync | CallSync) -> None:
        """Keeps a sync whose end is written; forgets the oldest ones over the bounds. Idempotent."""
        if sync in self._written:
            return
        sync.was_written = True
        if isinstance(sync, CallSync):
            if sync.desired.private:
                return
            ended = sync.desired
            sync.desired = changed_call(ended, ended.status, ended.trace, b"")  # its end needs no body
        elif sync.call is not None and sync.call.desired.private:
            return
        self._written[sync] = sync.journal.num_buffered if isinstance(sync, RecordSync) else 0
        self._num_written_tokens += self._written[sync]
        while len(self._written) > MAX_WRITTEN or self._num_written_tokens > MAX_WRITTEN_TOKENS:
            oldest = next(iter(self._written))
            self._num_written_tokens -= self._written.pop(oldest)
            if isinstance(oldest, CallSync):
                oldest.sequences.clear()

    def _revive(self, sync: RecordSync | CallSync) -> None:
        """Tracks a written sync again, unless its id was used again."""
        id = sync.desired.id
        self._num_written_tokens -= self._written.pop(sync)
        if isinstance(sync, RecordSync):
            self.sequences.setdefault(id, sync)
        else:
            self.calls.setdefault(id, sync)


def _needs_no_memory(chain: list[PlannedWrite]) -> bool:
    """True for a chain that a full server takes, and then all that follows it in the same script."""
    return isinstance(chain[0].write, EndCall)
