"""One admitted sequence: its slot, its state and the result of its attempts. Owned by `dispatcher`.

Drives `baton.domain.lifecycle`, mirrors every event and every token into the state store through the `StoreWriter`
(which never waits), and stamps the request's timer. Does no I/O of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton.domain.errors import BatonError, Cancelled, Interrupted, Superseded
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import TABLE, RequestEvent, RequestState, advance
from baton.domain.request import EngineRequest, FinishReason, OutputToken, finish_reason
from baton.store.store import SequenceRecord
from baton.telemetry.metrics import ABORTS_TOTAL, REQUESTS_IN_STATE, RETRIES_TOTAL
from baton.telemetry.request_timer import Milestone
from services.router.dispatch.admission_queue import Slot
from services.router.dispatch.attempt_events import (
    AttemptEvent,
    Decoded,
    DecodeImported,
    PrefillAccepted,
    PrefillSealed,
)
from services.router.dispatch.placement import Avoided, Pair
from services.router.dispatch.reserve import PairReservation
from services.router.dispatch.worker_errors import AttemptFailure
from services.router.generation import SequenceSpec, TokenChunk

_NUM_IN_STATE = {state: REQUESTS_IN_STATE.labels(state.value) for state in RequestState}


class MilestoneSink(Protocol):
    """Hears when a request reached a moment, and that it starts over."""

    def on_milestone(self, id: RequestId, milestone: Milestone) -> None: ...

    def on_retry(self, id: RequestId) -> None: ...


class RecordSink(Protocol):
    """The part of `StoreWriter` that is used here."""

    def create(self, record: SequenceRecord) -> None: ...

    def adopt(self, record: SequenceRecord) -> None: ...

    def advance(
        self,
        id: AttemptId,
        event: RequestEvent,
        *,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState: ...

    def write_tokens(
        self,
        id: AttemptId,
        tokens: Sequence[OutputToken],
        *,
        num_cached_tokens: int,
        finish: FinishReason | None = None,
        failure_code: str = "",
    ) -> None: ...


class TrackedRequest:
    """Implements `generation.AdmittedRequest`. `deadline` is of the loop's clock; `granted` is set when it may run.

    `record` is its first state in the store: RECEIVED, or QUEUED for a takeover under a later attempt.
    """

    def __init__(
        self, sequence: SequenceSpec, slot: Slot, record: SequenceRecord, deadline: float, records: RecordSink
    ) -> None:
        self.slot = slot
        self.deadline = deadline
        self.granted = asyncio.Event()
        self.started = False
        self.avoided = Avoided()
        self.last_error: Interrupted | None = None
        self.num_failures = 0  # of attempts, those that count, since decode last made a token
        self._sequence = sequence
        self._pair: Pair | None = None
        self._records = records
        self._id = AttemptId(sequence.id, record.attempt)
        self._state = record.state
        self._fingerprint = sequence.fingerprint
        self._emitted = [token.token for token in sequence.emitted]
        self._num_cached_tokens = sequence.num_cached_tokens
        _NUM_IN_STATE[self._state].inc()
        if record.state is RequestState.RECEIVED:
            records.create(record)
            self._transition(RequestEvent.ENQUEUE)
        else:
            records.adopt(record)
        if sequence.emitted:
            self._write_journal(sequence.emitted)

    @property
    def sequence(self) -> SequenceSpec:
        return self._sequence

    @property
    def attempt(self) -> int:
        return self._id.attempt

    @property
    def state(self) -> RequestState:
        return self._state

    @property
    def required_fingerprint(self) -> str:
        """The fingerprint that the next attempt's workers must have: that of the workers which made the first token,
        or had the sequence when it was taken over. "" while no token can have been heard."""
        return self._fingerprint if self._emitted or self._sequence.fingerprint else ""

    def engine_request(self) -> EngineRequest:
        """What the current attempt asks for: the prompt and all tokens emitted so far."""
        sequence = self._sequence
        tokens = (*sequence.prompt_tokens, *self._emitted)
        return EngineRequest(
            self._id, tokens, len(sequence.prompt_tokens), sequence.sampling, sequence.stop, sequence.salt
        )

    def on_reserved(self, reservation: PairReservation) -> None:
        """The attempt has its workers."""
        self._pair = reservation.pair
        self._fingerprint = reservation.pair.fingerprint
        self._transition(RequestEvent.RESERVE, fingerprint=self._fingerprint)
        if not reservation.pair.local:
            self._transition(RequestEvent.PREFILL)
        if not self._emitted:
            self._num_cached_tokens = reservation.decode_prefix_len

    def on_event(self, event: AttemptEvent) -> TokenChunk | None:
        """Moves on by one event of the attempt; returns what the client gets of it."""
        match event:
            case Decoded(tokens, finish):
                self._begin_decoding()
                self.num_failures = 0  # what both workers have survived is not what kills them
                return self._chunk(tokens, finish)
            case PrefillAccepted():
                return None
            case PrefillSealed(token, num_cached_tokens, finish):
                if not self._emitted:
                    num_cached = max(self._num_cached_tokens, num_cached_tokens)
                    self._num_cached_tokens = min(num_cached, len(self._sequence.prompt_tokens))
                self._transition(RequestEvent.SEAL)
                return self._chunk((token,), finish)
            case DecodeImported():
                self._begin_decoding()
                return None

    def on_attempt_failure(self, failure: AttemptFailure, may_retry: bool) -> None:
        """The attempt is lost: the next one begins, or the error stands. Raises it if not `may_retry`."""
        RETRIES_TOTAL.labels(self._state.value, failure.error.code, "retried" if may_retry else "given_up").inc()
        if not may_retry:
            raise failure.error
        self._transition(RequestEvent.INTERRUPT, failure.error.code)
        self._id = AttemptId(self._sequence.id, self._id.attempt + 1)
        self.num_failures += failure.counted
        self._transition(RequestEvent.RETRY)
        if self._pair is not None:
            self.avoided = failure.avoid(self.avoided, self._pair)
        self.last_error = failure.error

    def on_reserve_failure(self, pair: Pair) -> None:
        """A promise may have been given that nobody heard of."""
        self._pair = pair
        self._transition(RequestEvent.RESERVE)

    def complete(self) -> None:
        """See `AdmittedRequest.complete`. Before any attempt of this router it is cancelled, its journal complete."""
        if not self._state.terminal:
            self._write_journal((), finish=FinishReason.STOP)
            may_finish = (self._state, RequestEvent.FINISH) in TABLE
            self._end(RequestEvent.FINISH if may_finish else RequestEvent.CANCEL, "")

    def finish_if_complete(self) -> TokenChunk | None:
        """The end of a sequence whose emitted tokens are all there is; None if there is more to come."""
        emitted = self._sequence.emitted
        finish = finish_reason(self._sequence.stop, emitted[-1].token, len(emitted)) if emitted else None
        if finish is None:
            return None
        self._write_journal((), finish=finish)
        self._end(RequestEvent.CANCEL, "")
        return TokenChunk((), self._num_cached_tokens, finish)

    def fail(self, error: BatonError) -> None:
        """The request ends with an error. No effect after the end."""
        if not self._state.terminal:
            if not isinstance(error, Superseded):  # the journal is another router's then
                self._write_journal((), failure_code=error.code)
            self._end(RequestEvent.FAIL, error.code)

    def cancel(self) -> None:
        """The client went away. No effect after the end."""
        if not self._state.terminal:
            ABORTS_TOTAL.labels(self._state.value).inc()
            self._end(RequestEvent.CANCEL, Cancelled.code)

    def _begin_decoding(self) -> None:
        if self._state in (RequestState.SEALED, RequestState.RESERVED):
            self._transition(RequestEvent.DECODE)

    def _chunk(self, tokens: tuple[OutputToken, ...], finish: FinishReason | None) -> TokenChunk:
        self._emitted.extend([token.token for token in tokens])
        self._write_journal(tokens, finish=finish)
        if finish is not None:
            self._end(RequestEvent.FINISH, "")
        return TokenChunk(tokens, self._num_cached_tokens, finish)

    def _write_journal(
        self, tokens: Sequence[OutputToken], *, finish: FinishReason | None = None, failure_code: str = ""
    ) -> None:
        cached = self._num_cached_tokens
        self._records.write_tokens(self._id, tokens, num_cached_tokens=cached, finish=finish, failure_code=failure_code)

    def _end(self, event: RequestEvent, failure_code: str) -> None:
        self._transition(event, failure_code)
        _NUM_IN_STATE[self._state].dec()

    def _transition(self, event: RequestEvent, failure_code: str = "", fingerprint: str = "") -> None:
        before, self._state = self._state, advance(self._state, event)
        fields = {"failure_code": failure_code, "fingerprint": fingerprint}
        self._records.advance(self._id, event, num_emitted=len(self._emitted), **fields)
        _NUM_IN_STATE[before].dec()
        _NUM_IN_STATE[self._state].inc()
