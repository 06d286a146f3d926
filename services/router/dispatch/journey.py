"""One admitted request on its way: its ticket, its state, and what its attempts have made of it. Owned by `dispatcher`.

Drives `baton.domain.lifecycle`, mirrors every step and every token into the reception book through the `BookWriter`
(which never waits), and stamps the request's timeline. Does no I/O of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton.domain.errors import BatonError, Cancelled, Interrupted, Superseded
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import TABLE, RequestEvent, RequestState, advance
from baton.domain.request import EngineRequest, FinishReason, OutputToken, finish_reason
from baton.state.base import RequestRecord
from baton.telemetry.metrics import ABORTS_TOTAL, REPLAYS_TOTAL, REQUESTS_IN_STATE
from baton.telemetry.timeline import Moment
from services.router.dispatch.admission import Place
from services.router.dispatch.booking import Booking
from services.router.dispatch.conversation import Decoded, DecodeLanded, PrefillAccepted, PrefillSealed, Step
from services.router.dispatch.loss import AttemptLost
from services.router.dispatch.placement import Avoided, Pair
from services.router.generation import GenerationChunk, GenerationJob

_NUM_IN_STATE = {state: REQUESTS_IN_STATE.labels(state.value) for state in RequestState}


class Witness(Protocol):
    """Hears when a request reached a moment, and that it starts over."""

    def on_moment(self, id: RequestId, moment: Moment) -> None: ...

    def on_retry(self, id: RequestId) -> None: ...


class Pen(Protocol):
    """The part of `BookWriter` that is used here."""

    def create(self, record: RequestRecord) -> None: ...

    def adopt(self, record: RequestRecord) -> None: ...

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


class Journey:
    """A ticket (see `generation.Ticket`). `deadline` is of the loop's clock; `called` is set when it may run.

    `record` is how the book shall have it: RECEIVED, or QUEUED for a job that is carried on under a later attempt.
    """

    def __init__(self, job: GenerationJob, place: Place, record: RequestRecord, deadline: float, pen: Pen) -> None:
        self.place = place
        self.deadline = deadline
        self.called = asyncio.Event()
        self.started = False
        self.avoided = Avoided()
        self.last_error: Interrupted | None = None
        self.num_losses = 0  # of attempts, those that count, since decode last made a token
        self._job = job
        self._pair: Pair | None = None
        self._pen = pen
        self._id = AttemptId(job.id, record.attempt)
        self._state = record.state
        self._fingerprint = job.fingerprint
        self._emitted = [token.token for token in job.emitted]
        self._num_cached_tokens = job.num_cached_tokens
        _NUM_IN_STATE[self._state].inc()
        if record.state is RequestState.RECEIVED:
            pen.create(record)
            self._happen(RequestEvent.ENQUEUE)
        else:
            pen.adopt(record)
        if job.emitted:
            self._journal(job.emitted)

    @property
    def job(self) -> GenerationJob:
        return self._job

    @property
    def attempt(self) -> int:
        return self._id.attempt

    @property
    def state(self) -> RequestState:
        return self._state

    @property
    def pin(self) -> str:
        """The fingerprint that the next attempt's workers must have: that of the workers which made the first token,
        or had the job when it was taken over. "" while no token can have been heard."""
        return self._fingerprint if self._emitted or self._job.fingerprint else ""

    def request(self) -> EngineRequest:
        """What the current attempt asks for: the prompt and all tokens emitted so far."""
        job = self._job
        tokens = (*job.prompt_tokens, *self._emitted)
        return EngineRequest(self._id, tokens, len(job.prompt_tokens), job.sampling, job.stop, job.salt)

    def promised(self, booking: Booking) -> None:
        """The attempt has its workers."""
        self._pair = booking.pair
        self._fingerprint = booking.pair.fingerprint
        self._happen(RequestEvent.PROMISE, fingerprint=self._fingerprint)
        if not booking.pair.local:
            self._happen(RequestEvent.PREFILL)
        if not self._emitted:
            self._num_cached_tokens = booking.decode_prefix_len

    def take(self, step: Step) -> GenerationChunk | None:
        """Moves on by one step of the attempt; returns what the client gets of it."""
        match step:
            case Decoded(tokens, finish):
                self._begin_decoding()
                self.num_losses = 0  # what both workers have survived is not what kills them
                return self._chunk(tokens, finish)
            case PrefillAccepted():
                return None
            case PrefillSealed(token, num_cached_tokens, finish):
                if not self._emitted:
                    num_cached = max(self._num_cached_tokens, num_cached_tokens)
                    self._num_cached_tokens = min(num_cached, len(self._job.prompt_tokens))
                self._happen(RequestEvent.SEAL)
                return self._chunk((token,), finish)
            case DecodeLanded():
                self._begin_decoding()
                return None

    def lost(self, loss: AttemptLost, may_retry: bool) -> None:
        """The attempt is lost: the next one begins, or the error stands. Raises it if not `may_retry`."""
        REPLAYS_TOTAL.labels(self._state.value, loss.error.code, "retried" if may_retry else "given_up").inc()
        if not may_retry:
            raise loss.error
        self._happen(RequestEvent.INTERRUPT, loss.error.code)
        self._id = AttemptId(self._job.id, self._id.attempt + 1)
        self.num_losses += loss.counts
        self._happen(RequestEvent.RETRY)
        if self._pair is not None:
            self.avoided = loss.avoid(self.avoided, self._pair)
        self.last_error = loss.error

    def promise_lost(self, pair: Pair) -> None:
        """A promise may have been given that nobody heard of."""
        self._pair = pair
        self._happen(RequestEvent.PROMISE)

    def complete(self) -> None:
        """See `Ticket.complete`. What met its end before any attempt of ours is cancelled, its journal complete."""
        if not self._state.terminal:
            self._journal((), finish=FinishReason.STOP)
            may_finish = (self._state, RequestEvent.FINISH) in TABLE
            self._end(RequestEvent.FINISH if may_finish else RequestEvent.CANCEL, "")

    def finish_with_nothing_more(self) -> GenerationChunk | None:
        """The end of a job whose emitted tokens are all there is; None if there is more to come."""
        emitted = self._job.emitted
        finish = finish_reason(self._job.stop, emitted[-1].token, len(emitted)) if emitted else None
        if finish is None:
            return None
        self._journal((), finish=finish)
        self._end(RequestEvent.CANCEL, "")
        return GenerationChunk((), self._num_cached_tokens, finish)

    def failed(self, error: BatonError) -> None:
        """The request ends with an error. No effect after the end."""
        if not self._state.terminal:
            if not isinstance(error, Superseded):  # the journal is another router's then
                self._journal((), failure_code=error.code)
            self._end(RequestEvent.FAIL, error.code)

    def cancelled(self) -> None:
        """The client went away. No effect after the end."""
        if not self._state.terminal:
            ABORTS_TOTAL.labels(self._state.value).inc()
            self._end(RequestEvent.CANCEL, Cancelled.code)

    def _begin_decoding(self) -> None:
        if self._state in (RequestState.SEALED, RequestState.PROMISED):
            self._happen(RequestEvent.DECODE)

    def _chunk(self, tokens: tuple[OutputToken, ...], finish: FinishReason | None) -> GenerationChunk:
        self._emitted.extend([token.token for token in tokens])
        self._journal(tokens, finish=finish)
        if finish is not None:
            self._end(RequestEvent.FINISH, "")
        return GenerationChunk(tokens, self._num_cached_tokens, finish)

    def _journal(
        self, tokens: Sequence[OutputToken], *, finish: FinishReason | None = None, failure_code: str = ""
    ) -> None:
        cached = self._num_cached_tokens
        self._pen.write_tokens(self._id, tokens, num_cached_tokens=cached, finish=finish, failure_code=failure_code)

    def _end(self, event: RequestEvent, failure_code: str) -> None:
        self._happen(event, failure_code)
        _NUM_IN_STATE[self._state].dec()

    def _happen(self, event: RequestEvent, failure_code: str = "", fingerprint: str = "") -> None:
        before, self._state = self._state, advance(self._state, event)
        news = {"failure_code": failure_code, "fingerprint": fingerprint}
        self._pen.advance(self._id, event, num_emitted=len(self._emitted), **news)
        _NUM_IN_STATE[before].dec()
        _NUM_IN_STATE[self._state].inc()
