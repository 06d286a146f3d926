"""The task that writes the queue into the store: what is known of many calls, and all due journals, in one round trip.

What the store has refused, or may not have received, is read first and then written by single operations.

Owned by `StoreWriter`, which fills the queue. One event loop; knows no Redis.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import structlog

from baton.domain.ids import AttemptId
from baton.store.notifier import wait_for_event
from baton.store.store import JournalEntry, RecordLost, StateStore, StoreUnavailable, WriteOutcome
from baton.store.timed_event import TimedEvent
from baton.store.write_behind.call_sync import CallSync
from baton.store.write_behind.flush_pacer import FlushPacer
from baton.store.write_behind.planned_write import PlannedWrite
from baton.store.write_behind.record_sync import RecordSync
from baton.store.write_behind.sync_queue import SyncQueue
from baton.store.write_behind.write_batch import JournalBatch, WriteBatch
from baton.store.write_chain import ChainedWrite, WriteJournal, WriteResult

_WRITE, _SYNC = attrgetter("write"), attrgetter("sync")
_log = structlog.get_logger(__name__)
_MIN_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """Timing and bounds of a `StoreWriter`.

    `max_ended` bounds the ended sequences and calls that wait for a store that is away. `retry_s` is the pause after a
    failure, `idle_ping_s` the interval of pings while there is nothing to write. `opening_s`: longest wait of a new
    call for the workers of its first sequence, which are then written with it. `opening_gap_s`: from the begin of a
    round trip to one for calls that have their workers; those that come meanwhile share it.
    """

    max_ended: int = 10_000
    retry_s: float = 0.5
    idle_ping_s: float = 1.0
    journal_interval_s: float = 0.05
    opening_s: float = 0.05
    opening_gap_s: float = 0.005


class Flusher:
    """Writes while there is something to write; pauses while the store is away."""

    def __init__(
        self,
        store: StateStore,
        queue: SyncQueue,
        options: WriterOptions,
        *,
        on_degraded: Callable[[bool], None],
        on_superseded: Callable[[AttemptId], None],
    ) -> None:
        """See `StoreWriter`."""
        self._store = store
        self._queue = queue
        self._pacer = FlushPacer(options.journal_interval_s)
        self._options = options
        self._on_degraded = on_degraded
        self._on_superseded = on_superseded
        self._wake = TimedEvent()
        self._drained = asyncio.Event()
        self._retry_now = asyncio.Event()
        self._drained.set()
        self._is_drained = True
        self._task: asyncio.Task[None] | None = None
        self._flush_requested = False
        self._num_flushing = 0
        self._has_due = False
        self._opening: asyncio.TimerHandle | None = None  # set while calls wait to be opened
        self._opening_at = 0.0
        self._began_at = -math.inf  # the last round trip of chains
        self._sync_alone_next = False
        self._journals_alone = False
        self.degraded = False
        self.num_dropped = 0

    def on_queue_changed(self, changed: RecordSync | CallSync | None = None) -> None:
        """Drops what exceeds the bounds of the queue, and wakes the task. `changed`: the only sync that did.

        A new call does not wake it for `opening_s`, nor one with its workers for what is left of `opening_gap_s`. What
        wakes it, and a question for one of them, writes them as well: no response leaves before.
        """
        queue = self._queue
        if changed is None or changed.ended:  # nothing else fills it
            self._drop_excess()
        if self._is_drained and not queue.empty:
            self._is_drained = False
            self._drained.clear()
        if queue.has_at_once:
            opens = changed is not None and queue.opens_call(changed)
            if changed is None or (not opens and queue.is_urgent(changed)):
                self._wake.set()
                return
            now = _now()
            if opens:
                self._open_calls_at(self._began_at + self._options.opening_gap_s, now)
            else:
                self._open_calls_at(now + self._options.opening_s, now)
            self._note_due()
        elif self._queue.has_due and not self._has_due:
            self._wake.set()  # else it already waits for the time of the next flush

    def _drop_excess(self) -> None:
        while self._queue.over_limit:
            id = self._queue.drop_oldest()
            self.num_dropped += 1
            self._set_degraded(True, f"too many ended sequences wait to be written: {id} is dropped")

    def write_new_calls(self) -> None:
        """Writes new calls without waiting for their workers: somebody waits for the store to have one."""
        if self._opening is not None:
            self._open_calls()

    def _open_calls_at(self, when: float, now: float) -> None:
        """Lets calls wait to be opened until then, or until the time that is set if that is sooner."""
        if when <= now:
            self._open_calls()
        elif self._opening is None or when < self._opening_at:
            self._end_opening()
            self._opening_at, self._opening = when, asyncio.get_running_loop().call_at(when, self._open_calls)

    def _open_calls(self) -> None:
        self._end_opening()
        self._wake.set()

    def request_flush(self) -> None:
        """Flushes journals without waiting for the interval."""
        if not self._flush_requested:
            self._flush_requested = True
            self._wake.set()

    def start(self) -> None:
        """Starts the task inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="store-writer")

    async def flush(self, timeout_s: float) -> None:
        """Waits until everything is written, for at most `timeout_s`."""
        self._num_flushing += 1
        self._retry_now.set()
        self._wake.set()
        try:
            await wait_for_event(self._drained, timeout_s)
        finally:
            self._num_flushing -= 1

    async def close(self, timeout_s: float) -> None:
        """Flushes and stops the task; idempotent."""
        if self._task is not None:
            await self.flush(timeout_s)
            self._task.cancel()
            await asyncio.wait([self._task], timeout=timeout_s)
            self._end_opening()

    async def _run(self) -> None:
        """The root of the task."""
        while True:
            try:
                await self._step()
            except StoreUnavailable as error:
                self._set_degraded(True, str(error))
                await self._back_off()

    async def _step(self) -> None:
        """Does one piece of work: a flush when it is time, else what cannot wait for it, else a wait."""
        queue, has_due = self._queue, self._queue.has_due
        if self._num_flushing:
            self._end_opening()
        self._note_due()
        wait_s = 0.0 if self._num_flushing else self._pacer.wait_s(_now(), urgent=self._flush_requested)
        due = has_due and wait_s == 0.0
        sync = queue.next_sync() if self._opening is None else queue.next_urgent()
        batch = None
        if self._sync_alone_next and sync is not None and sync.status.alone:
            self._sync_alone_next = False
        elif due or (sync is not None and not sync.status.alone):
            batch = queue.next_batch(due=due, journals_alone=due and self._journals_alone)
        if batch is not None and not batch.empty:
            self._end_opening()
            await self._write(batch, due=due)
        elif sync is not None:
            await self._run_sync(sync)
        else:
            await self._wait_for_work(wait_s)

    def _note_due(self) -> None:
        """The interval runs from what is due first, also while new calls wait."""
        has_due = self._queue.has_due
        if has_due and not self._has_due:
            self._pacer.begin(_now())
        self._has_due = has_due

    def _end_opening(self) -> None:
        """Calls that wait to be opened go with the next round trip."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    async def _run_sync(self, sync: RecordSync | CallSync) -> None:
        """Runs a sync as far as it goes. An unforeseen failure must not stop the others.

        A reset that was noticed meanwhile may have come after the write: the sync begins again.
        """
        num_resets = self._queue.num_resets
        sync.status.refused = False
        try:
            await sync.run(self._store)
            sync.status.num_conflicts = 0
        except StoreUnavailable:
            sync.status.stale = True
            self._queue.update(sync)  # it may wait for journals since a change meanwhile: they go without a stale one
            self._queue.put_last(sync)
            raise
        except Exception as error:  # the root of this sync
            sync.status.failed(sync.desired.id, error)
            if sync.status.given_up:
                self._on_given_up(sync)
            elif isinstance(error, RecordLost) and isinstance(sync, RecordSync):
                self._queue.mark_stale(sync)
            elif isinstance(error, RecordLost) and isinstance(sync, CallSync):
                self._queue.recheck_sequences(sync)
        if self._queue.num_resets != num_resets:
            self._queue.reset(sync)
        else:
            self._queue.update(sync)
        self._update_status(complete=not self._queue.has_due)

    async def _write(self, batch: WriteBatch, *, due: bool) -> None:
        """Runs the chains and writes the journals of `batch`. `due`: it is a flush of journals."""
        began, num_resets, entries, more = _now(), self._queue.num_resets, batch.journals.entries, False
        self._began_at = began if batch.chains else self._began_at
        if due:
            self._flush_requested = self._journals_alone = False
        chains: list[list[ChainedWrite]] = [[WriteJournal(entries)]] if entries else []
        for chain in batch.chains:
            chains.append(list(map(_WRITE, chain)))
        try:
            results = await self._store.write_chains(chains)
        except StoreUnavailable:
            self._queue.doubt(batch.chains)
            self._sync_alone_next = True  # an end may fit where what a flush writes does not
            raise
        except Exception as error:  # the root of these writes: records are read, and then written one by one
            _log.warning("round_trip_failed", num_chains=len(batch.chains), reason=repr(error))
            self._queue.doubt(batch.chains)
            self._journals_alone = bool(batch.chains)
            for sync in () if batch.chains else batch.journals.syncs:
                self._drop_journal(sync, error)
        else:
            more = batch.leaves_chains
            self._sync_alone_next |= more  # flushes in a row leave no other turn to what is written alone
            reset = self._queue.num_resets != num_resets
            if entries:
                self._take_journals(batch.journals, results.pop(0)[0].outcomes, reset=reset)
            for chain, found in zip(batch.chains, results, strict=True):
                self._take_chain(chain, found, reset=reset)
        finally:
            if due:
                self._pacer.record(began, _now(), more=more)
        self._update_status(complete=batch.complete if due else not self._queue.has_due)

    def _take_chain(self, chain: list[PlannedWrite], results: list[WriteResult], *, reset: bool) -> None:
        """Takes note of the writes that ran. A refused record write is repeated alone, which tells why.

        `reset`: the store may have lost them since.
        """
        for planned, result in zip(chain, results, strict=False):
            sync, write = planned.sync, planned.write
            if isinstance(write, WriteJournal) and isinstance(sync, RecordSync):
                if result.accepted and not reset:
                    self._queue.note_written(sync, write.entries[0])
                else:
                    self._take_entry(sync, write.entries[0], result.outcomes[0], reset=reset)
            elif result.accepted:
                sync.take(planned, result)
                sync.status.num_conflicts = 0
            else:
                sync.status.refused = True
        for sync in dict.fromkeys(map(_SYNC, chain)):
            if reset:
                self._queue.reset(sync)
            else:
                self._queue.update(sync)

    def _take_journals(self, batch: JournalBatch, outcomes: Sequence[WriteOutcome], *, reset: bool) -> None:
        for sync, entry, outcome in zip(batch.syncs, batch.entries, outcomes, strict=True):
            self._take_entry(sync, entry, outcome, reset=reset)

    def _take_entry(self, sync: RecordSync, entry: JournalEntry, outcome: WriteOutcome, *, reset: bool) -> None:
        if reset and outcome is not WriteOutcome.SUPERSEDED:
            self._queue.reset(sync)
        elif outcome is WriteOutcome.DONE:
            self._queue.journal_written(sync, entry)
        else:
            self._on_refused(sync, outcome)

    def _on_refused(self, sync: RecordSync, outcome: WriteOutcome) -> None:
        if outcome is WriteOutcome.SUPERSEDED:
            self._mark_superseded(sync)
        elif sync.journal.rewind():
            self._queue.mark_stale(sync)
        else:
            self._drop_journal(sync, LookupError("the journal is lost, and its first tokens are not known here"))

    def _on_given_up(self, sync: RecordSync | CallSync) -> None:
        """Drops the journals of a record that is given up.

        Sequences that have ended here are written without their call: its new owner may have found them ended, and a
        store that was rolled back since needs their ends. Where it has begun them again, they are refused one by one.
        """
        for sequence in [sync] if isinstance(sync, RecordSync) else self._queue.sequences_of(sync):
            if sync.status.superseded and sequence.ended and sequence is not sync:
                self._queue.detach(sequence)
            elif sync.status.superseded:
                self._mark_superseded(sequence)
            else:
                self._queue.drop_journal(sequence)

    def _mark_superseded(self, sequence: RecordSync) -> None:
        """Another router has taken the sequence over."""
        sequence.status.given_up = True
        self._queue.drop_journal(sequence)
        already_reported, sequence.superseded_reported = sequence.superseded_reported, True
        if not (already_reported or sequence.ended):
            self._on_superseded(sequence.desired.attempt_id)

    def _drop_journal(self, sync: RecordSync, reason: Exception) -> None:
        _log.warning("journal_abandoned", request_id=sync.desired.id, reason=str(reason))
        self._queue.drop_journal(sync)

    def _update_status(self, *, complete: bool) -> None:
        """Records a success. `complete`: everything that was due at its start, and can be, has been written.

        Ends that the store had once are not waited for: new calls go before them.
        """
        if self._queue.empty:
            self._is_drained = True
            self._drained.set()
        if complete and not self._queue.lags:
            self._set_degraded(False, "everything is written")

    async def _wait_for_work(self, wait_s: float) -> None:
        """Waits for work; pings the store after an idle interval."""
        self._wake.clear()
        if self._queue.has_due:
            await self._wake.wait(max(wait_s, _MIN_WAIT_S))
        elif not await self._wake.wait(self._options.idle_ping_s):
            await self._store.ping()
            self._update_status(complete=not self._queue.has_due)

    async def _back_off(self) -> None:
        """Pauses after a failure; a flush cuts the pause short once."""
        await wait_for_event(self._retry_now, self._options.retry_s)
        self._retry_now.clear()

    def _set_degraded(self, degraded: bool, reason: str) -> None:
        if degraded != self.degraded:
            self.degraded = degraded
            event = "store_degraded" if degraded else "store_recovered"
            _log.warning(event, reason=reason, num_pending=self._queue.num_pending)
            if degraded:
                self._queue.mark_live_stale()
            self._on_degraded(degraded)


def _now() -> float:
    return asyncio.get_running_loop().time()
