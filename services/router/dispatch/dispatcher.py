"""The router's lower half: a sequence comes in at the door, tokens come out, whatever happens to workers in between.

Called by `api` through `generation.Dispatcher`. Owns the lobby and the attempt loop; knows no text, HTTP or Redis.

    admit -> (called by the door) -> book a pair -> attempt -> finish
                                        ^             | lost
                                        `- attempt+1 -'  prompt + emitted tokens, other workers if there are
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from baton.domain.errors import BatonError, Broken, ContextOverflow, Draining, NoWorkers, Refused, WorkerLost
from baton.domain.lifecycle import RequestState
from baton.kv.keys import page_keys
from baton.store.store import SequenceRecord
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import ADMISSION_TOTAL
from baton.telemetry.request_timer import Milestone
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.admission import AdmissionController
from services.router.dispatch.admission_queue import AdmissionLimits, Slot
from services.router.dispatch.attempt import Attempt
from services.router.dispatch.attempt_events import (
    AttemptEvent,
    Decoded,
    DecodeImported,
    PrefillAccepted,
    PrefillSealed,
)
from services.router.dispatch.reserve import PairReservation, ReserveFailure, ReserveLimits, Reserver
from services.router.dispatch.tracked_request import MilestoneSink, RecordSink, TrackedRequest
from services.router.dispatch.worker_errors import AttemptFailure
from services.router.dispatch.workers import WorkerSet
from services.router.generation import AdmittedRequest, SequenceSpec, TokenChunk

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """`retry_after_s`: what clients are told while there are no workers, or this router drains."""

    admission: AdmissionLimits
    reserve: ReserveLimits
    max_attempts: int
    retry_after_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Who this router is in the state store."""

    router_id: str
    model: str


class TokenDispatcher:
    """Implements `generation.Dispatcher`. Owned by one event loop."""

    def __init__(
        self,
        workers: WorkerSet,
        aborts: Aborts,
        records: RecordSink,
        timings: MilestoneSink,
        identity: RouterIdentity,
        limits: DispatchLimits,
    ) -> None:
        self._workers = workers
        self._aborts = aborts
        self._reserver = Reserver(workers, aborts, limits.reserve)
        self._records = records
        self._timings = timings
        self._identity = identity
        self._limits = limits
        self._admission = AdmissionController(limits.admission)
        workers.add_listener(lambda: self._admission.resize(workers.max_rows()))
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_open(self) -> int:
        """Tickets that are out, waiting and running."""
        return len(self._admission)

    def refuse_if_full(self, deadline_s: float) -> None:
        """See `Dispatcher.refuse_if_full`."""
        try:
            self._admission.refuse_if_full(deadline_s)
        except Refused as refusal:
            ADMISSION_TOTAL.labels("refused", refusal.code, "").inc()
            raise

    def admit(self, sequence: SequenceSpec) -> AdmittedRequest:
        """See `Dispatcher.admit`. `max_tokens` is cut to what the largest pair holds beyond the prompt."""
        try:
            fitted = self._fit_to_workers(sequence)
            tracked = self._admission.admit(
                len(sequence.prompt_tokens),
                lambda slot: self._track(fitted, slot),
                deadline_s=sequence.deadline_s,
                force=_is_takeover(sequence),
            )
        except Refused as refusal:
            ADMISSION_TOTAL.labels("refused", refusal.code, "").inc()
            raise
        ADMISSION_TOTAL.labels("admitted", "", "").inc()
        self._timings.on_milestone(sequence.id, Milestone.ADMITTED)
        return tracked

    def release(self, admitted: AdmittedRequest) -> None:
        """See `Dispatcher.release`. A admitted that is being run is given back by its run."""
        tracked = self._admission.get_unstarted(admitted)
        if tracked is not None:
            tracked.cancel()
            self._admission.release(tracked)

    async def run(self, admitted: AdmittedRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `Dispatcher.run`."""
        tracked = self._admission.start(admitted)
        try:
            await self._admission.wait_for_slot(tracked)
            last = tracked.finish_if_complete()
            if last is not None:
                yield last
                return
            async with aclosing(self._run_attempts(tracked)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except BatonError as error:
            tracked.fail(error)
            raise
        finally:
            tracked.cancel()
            self._admission.release(tracked)

    def drain(self) -> None:
        """Takes nothing new from now on."""
        self._draining = True

    async def wait_empty(self) -> None:
        """Waits until no admitted is out."""
        await self._admission.wait_empty()

    def _fit_to_workers(self, sequence: SequenceSpec) -> SequenceSpec:
        """The sequence as the workers that are here can do it. Raises what `admit` raises for want of workers."""
        if self._draining:
            raise Draining("this router is shutting down", retry_after_s=self._limits.retry_after_s)
        if sequence.id in self._admission:
            raise Broken(f"a request with the id {sequence.id} is under way: attempts are fenced by it")
        max_request_tokens = self._workers.max_request_tokens()
        if max_request_tokens is None and _is_takeover(sequence):
            return sequence  # it is under way, and waits for workers as one does that has lost them
        if max_request_tokens is None:
            _, detail = self._workers.readiness()
            raise NoWorkers(detail, retry_after_s=self._limits.retry_after_s)
        # A pool may hold less than the model's context, to which `max_tokens` was fitted if the client gave none.
        room = max_request_tokens - len(sequence.prompt_tokens)
        if room < max(1, sequence.stop.min_tokens, len(sequence.emitted)):
            num_output_tokens = max(1, sequence.stop.min_tokens)
            parts = f"{len(sequence.prompt_tokens)} prompt tokens and at least {num_output_tokens} output tokens"
            raise ContextOverflow(f"{parts} do not fit: no worker here holds more than {max_request_tokens} tokens")
        return replace(sequence, stop=replace(sequence.stop, max_tokens=min(sequence.stop.max_tokens, room)))

    def _track(self, sequence: SequenceSpec, slot: Slot) -> TrackedRequest:
        identity, num_prompt_tokens = self._identity, len(sequence.prompt_tokens)
        state = RequestState.QUEUED if sequence.attempt > 1 else RequestState.RECEIVED
        record = SequenceRecord(
            sequence.id,
            sequence.attempt,
            state,
            identity.router_id,
            identity.model,
            num_prompt_tokens,
            len(sequence.emitted),
            fingerprint=sequence.fingerprint,
        )
        deadline = asyncio.get_running_loop().time() + sequence.deadline_s
        return TrackedRequest(sequence, slot, record, deadline, self._records)

    async def _run_attempts(self, tracked: TrackedRequest) -> AsyncGenerator[TokenChunk, None]:
        """One attempt after another, until one finishes or none may follow."""
        while True:
            try:
                reservation = await self._reserve(tracked)
                tracked.on_reserved(reservation)
                self._timings.on_milestone(tracked.sequence.id, Milestone.RESERVED)
                async with aclosing(self._run_attempt(tracked, reservation)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except AttemptFailure as failure:
                self._on_attempt_failure(tracked, failure)

    async def _reserve(self, tracked: TrackedRequest) -> PairReservation:
        try:
            reservation = await self._reserver.reserve(
                tracked.engine_request(), tracked.avoided, tracked.deadline, tracked.required_fingerprint
            )
        except ReserveFailure as failure:
            tracked.on_reserve_failure(failure.pair)
            raise
        if reservation is None:
            worker_wait_s = self._limits.reserve.worker_wait_s
            raise tracked.last_error or WorkerLost(f"no linked prefill/decode pair appeared within {worker_wait_s:g} s")
        return reservation

    async def _run_attempt(
        self, tracked: TrackedRequest, reservation: PairReservation
    ) -> AsyncGenerator[TokenChunk, None]:
        """One attempt on its booked pair; chunks for the client."""
        request = tracked.engine_request()
        attempt = Attempt(request, reservation, tracked.deadline, self._workers, self._aborts)
        try:
            async with aclosing(attempt.events()) as events:
                async for event in events:
                    before = tracked.state
                    chunk = tracked.on_event(event)
                    self._record_event(tracked, reservation, event, before)
                    if chunk is not None:
                        yield chunk
        finally:
            self._workers.on_ended(request.id)

    def _on_attempt_failure(self, tracked: TrackedRequest, failure: AttemptFailure) -> None:
        may_retry = not failure.counted or tracked.num_failures + 1 < self._limits.max_attempts
        log.warning(
            "attempt_failed",
            request_id=tracked.sequence.id,
            attempt=tracked.attempt,
            phase=tracked.state.value,
            code=failure.error.code,
            reason=str(failure.error),
            retried=may_retry,
        )
        tracked.on_attempt_failure(failure, may_retry)
        self._timings.on_retry(tracked.sequence.id)

    def _record_event(
        self, tracked: TrackedRequest, reservation: PairReservation, event: AttemptEvent, before: RequestState
    ) -> None:
        """Stamps the moment that a event was, and remembers who holds which pages now."""
        prefill, decode = reservation.pair.prefill, reservation.pair.decode
        match event:
            case Decoded(finish=finish):
                if before is RequestState.RESERVED:  # decode has computed the prompt
                    self._admission.on_first_token(tracked)
                    self._workers.add_cached_pages(decode, reservation.keys)
                if finish is not None:
                    computed = tracked.engine_request().tokens[:-1]  # nobody asked for what follows the last one
                    self._workers.add_cached_pages(decode, page_keys(computed, decode.page_size, tracked.sequence.salt))
            case PrefillAccepted():
                self._timings.on_milestone(tracked.sequence.id, Milestone.PREFILL_ACCEPTED)
            case PrefillSealed():
                self._admission.on_first_token(tracked)
                self._timings.on_milestone(tracked.sequence.id, Milestone.SEALED)
                self._workers.add_cached_pages(prefill, reservation.keys)
            case DecodeImported():
                self._timings.on_milestone(tracked.sequence.id, Milestone.IMPORTED)
                self._workers.add_cached_pages(decode, reservation.keys)


def _is_takeover(sequence: SequenceSpec) -> bool:
    """Whether the sequence is under way already: another attempt, perhaps another router, has begun it."""
    return sequence.attempt > 1 or bool(sequence.emitted)
