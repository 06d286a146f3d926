"""Writes the router's calls, sequences and tokens into the store asynchronously (write-behind).

The router notes each change (`open_call`, `create`, `advance`, `write_tokens`) and returns at once. One task writes
calls and sequences in the order in which they changed, and between them the tokens of all sequences together, every
`journal_interval_s`. A sequence is kept as its latest record and its tokens, not as a history: while the store is slow
or away, successive updates are coalesced, so the queue is bounded by the live sequences plus `max_ended` ended ones.
When the store is back, each sync reads its record and applies the table from there; lost records and journals are
written again. Uses the contracts of `store` only; knows no Redis.

Order: a call is opened before the tokens of its sequences are written. A sequence ends after its last token, and a call
after its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.store import transitions
from baton.store.store import MAX_TRACE_BYTES, CallRecord, CallStatus, SequenceRecord, StateStore
from baton.store.timed_event import TimedEvent
from baton.store.write_behind.call_sync import CallSync, changed_call
from baton.store.write_behind.flusher import Flusher, WriterOptions
from baton.store.write_behind.record_sync import RecordSync
from baton.store.write_behind.sync_queue import SyncQueue

MAX_BODY_BYTES = 256 * 1024
"""A call with a larger body is not written."""

MAX_UNWRITTEN_TOKENS = 64
"""A sequence with so many unwritten tokens has its journal written before its time."""

MAX_ENDED_TOKENS = 1 << 20
"""Most tokens of ended sequences that are kept for a store that is away."""


class StoreWriter:
    """Notes changes for the store. One event loop; no method waits for the store, or fails because of it."""

    def __init__(
        self,
        store: StateStore,
        options: WriterOptions | None = None,
        *,
        on_degraded: Callable[[bool], None] = lambda degraded: None,
        on_superseded: Callable[[AttemptId], None] = lambda id: None,
    ) -> None:
        """`on_degraded` gets True when the store stops answering or the queue drops an ended sequence.

        It gets False once everything is written again. `on_superseded` gets, once, a live sequence that another router
        has taken over: nothing more is written of it. The caller closes the store.
        """
        options = options or WriterOptions()
        self._queue = SyncQueue(options.max_ended, MAX_ENDED_TOKENS)
        self._flusher = Flusher(store, self._queue, options, on_degraded=on_degraded, on_superseded=on_superseded)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def degraded(self) -> bool:
        """True while the store lags behind for want of an answer: new calls are not durable."""
        return self._flusher.degraded

    @property
    def num_pending(self) -> int:
        """Calls and sequences whose last change, or last token, is not in the store yet."""
        return self._queue.num_pending

    @property
    def num_dropped(self) -> int:
        """Ended calls and sequences that the queue dropped because it was full."""
        return self._flusher.num_dropped

    def open_call(self, record: CallRecord, *, claimed: bool = False) -> TimedEvent | None:
        """Notes a new OPEN call, before its sequences are created; the event is set when the store has it.

        `claimed`: the store has `record` already. Returns None when the body is too large: then neither the call nor
        the tokens of its sequences are written. Raises `Broken` when the call is not OPEN or its id is in use here.
        """
        transitions.check_new_call(record)
        if not _is_over(self._queue.calls.get(record.id)):
            raise Broken(f"call {record.id} is already being written")
        call = CallSync(record, stored=CallStatus.OPEN if claimed else None)
        call.status.given_up = len(record.body) > MAX_BODY_BYTES
        self._queue.add_call(call)
        self._flusher.on_queue_changed(call)
        return None if call.status.given_up else call.durable

    def adopt_call(self, record: CallRecord) -> None:
        """Notes a call that this owner has claimed; the store has `record`."""
        self.open_call(record, claimed=True)

    def write_new_calls(self) -> None:
        """Writes new calls now, whose sequences have no workers yet: somebody waits for the store to have one."""
        self._flusher.write_new_calls()

    def end_call(self, id: RequestId, status: CallStatus, trace: bytes = b"") -> None:
        """Notes that a call is ABANDONED or ENDED, and its encoded trace; no effect when it is not open here.

        A trace over `MAX_TRACE_BYTES` is not written.
        """
        transitions.check_call_end(id, status)
        call = self._queue.calls.get(id)
        if call is not None and not call.ended:
            trace = trace if len(trace) <= MAX_TRACE_BYTES else b""
            call.desired, call.ended = changed_call(call.desired, status, trace, call.desired.body), True
            self._update(call)

    def tracks_call(self, id: RequestId) -> bool:
        """True while the call is open here, or its end is not in the store yet."""
        return id in self._queue.calls

    def has_ended(self, record: CallRecord) -> bool:
        """True if the call has ended here under the ballot of `record`, and the store does not know yet."""
        call = self._queue.calls.get(record.id)
        return call is not None and call.ended and call.desired.ballot == record.ballot

    def create(self, record: SequenceRecord) -> None:
        """Notes a new sequence. Raises `Broken` unless it is in state RECEIVED and its id is not in use here."""
        transitions.check_new_sequence(record)
        if record.id in self._queue.sequences:
            raise Broken(f"request {record.id} is already being written")
        sync = RecordSync(record)
        self._queue.add_sequence(sync)
        self._flusher.on_queue_changed(sync)

    def adopt(self, record: SequenceRecord) -> None:
        """Notes a sequence that is taken over: the store has it QUEUED under `record.attempt`, as the claim left it.

        Write what earlier attempts emitted first (`write_tokens` from index 0): the store keeps what it has, and a
        journal that is lost can be written again. Raises `Broken` in another state, or when the sequence is live here.
        """
        earlier = self._queue.sequences.get(record.id)
        if record.state is not RequestState.QUEUED or not _is_over(earlier):
            raise Broken(f"request {record.id} cannot be taken over: it is {record.state.value}, or still live here")
        self._queue.add_sequence(RecordSync(record, stored=record))
        self._flusher.on_queue_changed()

    def record_end(
        self, record: SequenceRecord, end: RequestState, *, num_emitted: int, failure_code: str = ""
    ) -> None:
        """Notes the end of a sequence whose last owner died before it could write it; the store holds `record`.

        No effect when there is no way from there to `end`, or when the sequence is live here, or its end is noted.
        """
        earlier = self._queue.sequences.get(record.id)
        if earlier is not None and not earlier.status.given_up and earlier.desired.attempt_id == record.attempt_id:
            return
        desired = replace(record, state=end, num_emitted=num_emitted, failure_code=failure_code)
        if transitions.shortest_path(record.state, end) and _is_over(earlier):
            self._queue.add_sequence(RecordSync(desired, stored=record, ended=True))
            self._flusher.on_queue_changed()

    def advance(
        self,
        id: AttemptId,
        event: RequestEvent,
        *,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        """Notes an event and returns the new state; the errors are those of `SequenceStore.advance`."""
        sync = self._queue.sequences.get(id.request_id)
        if sync is None or sync.ended:
            raise Broken(f"{event.value} of {id}: no such request here, or it has ended")
        sync.update(
            transitions.apply_event(
                sync.desired, id, event, num_emitted=num_emitted, failure_code=failure_code, fingerprint=fingerprint
            )
        )
        if sync.ended or fingerprint or not self._queue.holds(sync):
            self._update(sync)  # else its record is due already, and stays where it waits
        return sync.desired.state

    def write_tokens(
        self,
        id: AttemptId,
        tokens: Sequence[OutputToken],
        *,
        num_cached_tokens: int,
        finish: FinishReason | None = None,
        failure_code: str = "",
    ) -> None:
        """Notes what a live sequence has emitted, in order; `finish` or `failure_code` end its journal.

        Skips tokens that it has. Call it before the `advance` that ends the sequence; no effect afterwards. Raises
        `Broken` when a token is missing.
        """
        sync = self._queue.sequences.get(id.request_id)
        if sync is None or sync.ended:
            return
        num_unwritten = sync.journal.append(
            tokens, num_cached_tokens=num_cached_tokens, finish=finish, failure_code=failure_code
        )
        if sync not in self._queue.due_journals:
            self._update(sync)
        if num_unwritten >= MAX_UNWRITTEN_TOKENS:
            self._flusher.request_flush()

    def give_up(self, id: RequestId) -> None:
        """Writes nothing more of a live sequence: another owner continues it. Its record and journal stay as they are.

        Call it before the `advance` that ends the sequence here.
        """
        sync = self._queue.sequences.get(id)
        if sync is not None and not sync.ended:
            sync.status.given_up = sync.superseded_reported = True
            self._queue.drop_journal(sync)

    def put_again(self) -> None:
        """Writes every call, sequence and journal again that is under way here, after a reset of the store.

        `on_superseded` then gets idle sequences, too.
        """
        self._queue.mark_reset()
        self._flusher.on_queue_changed()

    def start(self) -> None:
        """Starts the task inside a running loop; idempotent."""
        self._flusher.start()

    async def flush(self, timeout_s: float) -> int:
        """Waits until everything is written, for at most `timeout_s`; returns how many calls and sequences are not."""
        await self._flusher.flush(timeout_s)
        return self.num_pending

    async def close(self, timeout_s: float = 2.0) -> int:
        """Flushes and stops; returns how many calls and sequences stay unwritten. Idempotent."""
        await self._flusher.close(timeout_s)
        return self.num_pending

    def _update(self, sync: RecordSync | CallSync) -> None:
        self._queue.update(sync)
        self._flusher.on_queue_changed(sync)


def _is_over(sync: RecordSync | CallSync | None) -> bool:
    """Nothing new is written of it: its id may be used again."""
    return sync is None or sync.ended or sync.status.given_up
