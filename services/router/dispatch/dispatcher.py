"""The router's lower half: a job comes in at the door, tokens come out, whatever happens to workers in between.

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
from baton.state.base import RequestRecord
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import ADMISSION_TOTAL
from baton.telemetry.timeline import Moment
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.admission import DoorLimits, Place
from services.router.dispatch.attempt import Attempt
from services.router.dispatch.booking import Booker, Booking, BookingLimits, PromiseLost
from services.router.dispatch.conversation import Decoded, DecodeLanded, PrefillAccepted, PrefillSealed, Step
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.journey import Journey, Pen, Witness
from services.router.dispatch.lobby import Lobby
from services.router.dispatch.loss import AttemptLost
from services.router.generation import GenerationChunk, GenerationJob, Ticket

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """`retry_after_s`: what clients are told while there are no workers, or this router drains."""

    door: DoorLimits
    booking: BookingLimits
    max_attempts: int
    retry_after_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this router is in the reception book."""

    router_id: str
    model: str


class TokenDispatcher:
    """Implements `generation.Dispatcher`. Owned by one event loop."""

    def __init__(
        self, fleet: Fleet, aborts: Aborts, pen: Pen, witness: Witness, identity: Identity, limits: DispatchLimits
    ) -> None:
        self._fleet = fleet
        self._aborts = aborts
        self._booker = Booker(fleet, aborts, limits.booking)
        self._pen = pen
        self._witness = witness
        self._identity = identity
        self._limits = limits
        self._lobby = Lobby(limits.door)
        fleet.listen(lambda: self._lobby.resize(fleet.max_rows()))
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_open(self) -> int:
        """Tickets that are out, waiting and running."""
        return len(self._lobby)

    def refuse_if_full(self, deadline_s: float) -> None:
        """See `Dispatcher.refuse_if_full`."""
        try:
            self._lobby.refuse_if_full(deadline_s)
        except Refused as refusal:
            ADMISSION_TOTAL.labels("refused", refusal.code, "").inc()
            raise

    def admit(self, job: GenerationJob) -> Ticket:
        """See `Dispatcher.admit`. `max_tokens` is cut to what the largest pair holds beyond the prompt."""
        try:
            fitted = self._fitted(job)
            journey = self._lobby.enter(
                len(job.prompt_tokens),
                lambda place: self._begin(fitted, place),
                deadline_s=job.deadline_s,
                always=_carried_on(job),
            )
        except Refused as refusal:
            ADMISSION_TOTAL.labels("refused", refusal.code, "").inc()
            raise
        ADMISSION_TOTAL.labels("admitted", "", "").inc()
        self._witness.on_moment(job.id, Moment.ADMITTED)
        return journey

    def release(self, ticket: Ticket) -> None:
        """See `Dispatcher.release`. A ticket that is being run is given back by its run."""
        journey = self._lobby.unstarted(ticket)
        if journey is not None:
            journey.cancelled()
            self._lobby.leave(journey)

    async def run(self, ticket: Ticket) -> AsyncGenerator[GenerationChunk, None]:
        """See `Dispatcher.run`."""
        journey = self._lobby.start(ticket)
        try:
            await self._lobby.wait_for_call(journey)
            last = journey.finish_with_nothing_more()
            if last is not None:
                yield last
                return
            async with aclosing(self._attempts(journey)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except BatonError as error:
            journey.failed(error)
            raise
        finally:
            journey.cancelled()
            self._lobby.leave(journey)

    def drain(self) -> None:
        """Takes nothing new from now on."""
        self._draining = True

    async def wait_empty(self) -> None:
        """Waits until no ticket is out."""
        await self._lobby.wait_empty()

    def _fitted(self, job: GenerationJob) -> GenerationJob:
        """The job as the workers that are here can do it. Raises what `admit` raises for want of workers."""
        if self._draining:
            raise Draining("this router is shutting down", retry_after_s=self._limits.retry_after_s)
        if job.id in self._lobby:
            raise Broken(f"a request with the id {job.id} is under way: attempts are fenced by it")
        max_request_tokens = self._fleet.max_request_tokens()
        if max_request_tokens is None and _carried_on(job):
            return job  # it is under way, and waits for workers as one does that has lost them
        if max_request_tokens is None:
            _, detail = self._fleet.readiness()
            raise NoWorkers(detail, retry_after_s=self._limits.retry_after_s)
        # A pool may hold less than the model's context, to which `max_tokens` was fitted if the client gave none.
        room = max_request_tokens - len(job.prompt_tokens)
        if room < max(1, job.stop.min_tokens, len(job.emitted)):
            parts = f"{len(job.prompt_tokens)} prompt tokens and at least {max(1, job.stop.min_tokens)} output tokens"
            raise ContextOverflow(f"{parts} do not fit: no worker here holds more than {max_request_tokens} tokens")
        return replace(job, stop=replace(job.stop, max_tokens=min(job.stop.max_tokens, room)))

    def _begin(self, job: GenerationJob, place: Place) -> Journey:
        identity, num_prompt_tokens = self._identity, len(job.prompt_tokens)
        state = RequestState.QUEUED if job.attempt > 1 else RequestState.RECEIVED
        record = RequestRecord(
            job.id,
            job.attempt,
            state,
            identity.router_id,
            identity.model,
            num_prompt_tokens,
            len(job.emitted),
            fingerprint=job.fingerprint,
        )
        deadline = asyncio.get_running_loop().time() + job.deadline_s
        return Journey(job, place, record, deadline, self._pen)

    async def _attempts(self, journey: Journey) -> AsyncGenerator[GenerationChunk, None]:
        """One attempt after another, until one finishes or none may follow."""
        while True:
            try:
                booking = await self._book(journey)
                journey.promised(booking)
                self._witness.on_moment(journey.job.id, Moment.PROMISED)
                async with aclosing(self._attempt(journey, booking)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except AttemptLost as loss:
                self._lose(journey, loss)

    async def _book(self, journey: Journey) -> Booking:
        try:
            booking = await self._booker.book(journey.request(), journey.avoided, journey.deadline, journey.pin)
        except PromiseLost as loss:
            journey.promise_lost(loss.pair)
            raise
        if booking is None:
            patience_s = self._limits.booking.patience_s
            raise journey.last_error or WorkerLost(f"no linked prefill/decode pair appeared within {patience_s:g} s")
        return booking

    async def _attempt(self, journey: Journey, booking: Booking) -> AsyncGenerator[GenerationChunk, None]:
        """One attempt on its booked pair; chunks for the client."""
        request = journey.request()
        attempt = Attempt(request, booking, journey.deadline, self._fleet, self._aborts)
        try:
            async with aclosing(attempt.steps()) as steps:
                async for step in steps:
                    before = journey.state
                    chunk = journey.take(step)
                    self._note(journey, booking, step, before)
                    if chunk is not None:
                        yield chunk
        finally:
            self._fleet.settled(request.id)

    def _lose(self, journey: Journey, loss: AttemptLost) -> None:
        may_retry = not loss.counts or journey.num_losses + 1 < self._limits.max_attempts
        log.warning(
            "attempt_lost",
            request_id=journey.job.id,
            attempt=journey.attempt,
            phase=journey.state.value,
            code=loss.error.code,
            reason=str(loss.error),
            retried=may_retry,
        )
        journey.lost(loss, may_retry)
        self._witness.on_retry(journey.job.id)

    def _note(self, journey: Journey, booking: Booking, step: Step, before: RequestState) -> None:
        """Stamps the moment that a step was, and remembers who holds which pages now."""
        prefill, decode = booking.pair.prefill, booking.pair.decode
        match step:
            case Decoded(finish=finish):
                if before is RequestState.PROMISED:  # decode has computed the prompt
                    self._lobby.answered(journey)
                    self._fleet.holds(decode, booking.keys)
                if finish is not None:
                    computed = journey.request().tokens[:-1]  # nobody asked for what follows the last one
                    self._fleet.holds(decode, page_keys(computed, decode.page_size, journey.job.salt))
            case PrefillAccepted():
                self._witness.on_moment(journey.job.id, Moment.PREFILL_ACCEPTED)
            case PrefillSealed():
                self._lobby.answered(journey)
                self._witness.on_moment(journey.job.id, Moment.SEALED)
                self._fleet.holds(prefill, booking.keys)
            case DecodeLanded():
                self._witness.on_moment(journey.job.id, Moment.LANDED)
                self._fleet.holds(decode, booking.keys)


def _carried_on(job: GenerationJob) -> bool:
    """Whether the job is under way already: another attempt, perhaps another router, has begun it."""
    return job.attempt > 1 or bool(job.emitted)
