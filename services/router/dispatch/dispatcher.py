"""Admits sequences and runs them on workers, one attempt after another.

Called through `generation.Dispatcher`. Knows no text, HTTP or Redis.

    admit -> (a slot) -> (its model) -> reserve a pair -> attempt -> finish
                             ^                               | failure
                             `-------- attempt+1 ------------'  prompt + emitted tokens, other workers if there are any
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from baton.domain.errors import (
    BatonError,
    Broken,
    ContextOverflow,
    Draining,
    NeedMedia,
    NoRoom,
    NoWorkers,
    Refused,
    Superseded,
    WorkerLost,
)
from baton.domain.lifecycle import RequestState
from baton.services.router.admission.admission_queue import AdmissionLimits, AdmissionQueue
from baton.services.router.admission.slot import SlotSpec
from baton.services.router.admission.tenants import MAX_PRIORITY, TenantTable
from baton.services.router.dispatch.aborts import Aborts
from baton.services.router.dispatch.admission import AdmissionController
from baton.services.router.dispatch.attempt import Attempt
from baton.services.router.dispatch.media.budget import MediaBudget
from baton.services.router.dispatch.media.uploader import MediaUploader
from baton.services.router.dispatch.prefill.prefill_run import PrefillRun
from baton.services.router.dispatch.rate_limiter import RateLimiter
from baton.services.router.dispatch.reserve import PairReservation, ReserveFailure, ReserveLimits, Reserver
from baton.services.router.dispatch.status_log import StatusLog
from baton.services.router.dispatch.tracked_request import TrackedRequest
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource
from baton.services.router.dispatch.workers import WorkerSet
from baton.services.router.generation import AdmittedRequest, SequenceSpec, TakeChunk, TokenChunk
from baton.store.store import SequenceRecord
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import ADMISSION_TOTAL
from baton.telemetry.request_trace import Stage
from baton.telemetry.sequence_timer import SequenceTimer

MAX_NEED_MEDIA = 8
"""Attempts of a request that may end because prefill has lost images."""

log = get_logger(__name__)

_num_admitted = cache(partial(ADMISSION_TOTAL.labels, "admitted", ""))  # by tenant; a metric keeps its children, too


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """`retry_after_s`: Retry-After for clients while no worker is ready or the router drains.

    `max_media_bytes`: files of images of all admitted sequences.
    """

    admission: AdmissionLimits
    reserve: ReserveLimits
    max_attempts: int
    retry_after_s: float = 5.0
    tenants: TenantTable = field(default_factory=TenantTable)
    max_media_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Names of the router and its model in the state store."""

    router_id: str
    model: str


class TokenDispatcher:
    """Implements `generation.Dispatcher`. Owned by one event loop."""

    def __init__(
        self,
        workers: WorkerSet,
        aborts: Aborts,
        records: StoreWriter,
        identity: RouterIdentity,
        limits: DispatchLimits,
        rates: RateLimiter | None = None,
    ) -> None:
        """`rates`: None for no limits."""
        self._workers = workers
        self._aborts = aborts
        self._media_budget = MediaBudget(limits.max_media_bytes)
        self._uploader = MediaUploader(workers)
        self._admission = AdmissionController(limits.admission, limits.tenants, workers)
        self._prefill = partial(PrefillRun, workers, self._uploader, coming=self._admission.coming)
        self._reserver = Reserver(workers, aborts, limits.reserve, self._prefill)
        self._records = records
        self._identity = identity
        self._limits = limits
        self._rates = rates
        workers.add_listener(self._admission.on_workers)
        self._draining = False
        self._clock = asyncio.get_running_loop().time
        self._status = StatusLog(self._status_fields)
        self.num_tokens = 0
        """Output tokens since the start."""

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def admission_queue(self) -> AdmissionQueue:
        """The queue, for the exchange with other routers."""
        return self._admission.queue

    def tracked(self) -> Iterable[TrackedRequest]:
        """The admitted sequences, waiting and running, oldest first. Read only."""
        return self._admission.tracked()

    @property
    def num_open(self) -> int:
        """Counts the admitted requests, waiting and running."""
        return len(self._admission)

    def refuse_if_full(self, deadline_s: float, tenant: str = "") -> None:
        """See `Dispatcher.refuse_if_full`. The body may ask for the highest priority."""
        try:
            self._admission.queue.refuse_if_full(SlotSpec(tenant, priority=MAX_PRIORITY), self._clock(), deadline_s)
        except Refused as refusal:
            ADMISSION_TOTAL.labels("refused", refusal.code, tenant).inc()
            raise

    async def reserve_rates(self, tenant: str, sequences: Sequence[SequenceSpec]) -> None:
        """See `Dispatcher.reserve_rates`."""
        if self._rates is not None:
            await self._rates.reserve(tenant, sequences)

    def forgo(self, sequences: Sequence[SequenceSpec]) -> None:
        """See `Dispatcher.forgo`."""
        if self._rates is not None:
            self._rates.forgo(sequences)

    def admit(self, sequence: SequenceSpec, timer: SequenceTimer) -> AdmittedRequest:
        """See `Dispatcher.admit`. Cuts `max_tokens` to what the largest pair holds beyond the prompt."""
        now = self._clock()
        is_takeover = sequence.attempt > 1 or bool(
            sequence.emitted
        )  # begun by another attempt, perhaps on another router
        try:
            fitted = self._fit_to_workers(sequence, is_takeover)
            num_tokens = len(sequence.prompt_tokens)
            spec = SlotSpec(sequence.tenant, num_tokens, fitted.stop.max_tokens, sequence.priority)
            self._media_budget.hold(sequence.files, force=is_takeover)
            try:
                slot = self._admission.queue.admit(spec, now, sequence.deadline_s, force=is_takeover)
            except BaseException:
                self._media_budget.release(sequence.files)
                raise
        except Refused as refusal:
            ADMISSION_TOTAL.labels("refused", refusal.code, sequence.tenant).inc()
            raise
        _num_admitted(sequence.tenant).inc()
        record = SequenceRecord(
            sequence.id,
            sequence.attempt,
            RequestState.QUEUED if sequence.attempt > 1 else RequestState.RECEIVED,
            self._identity.router_id,
            self._identity.model,
            num_tokens,
            len(sequence.emitted),
            fingerprint=sequence.fingerprint,
            owner_tag=sequence.owner_tag,
        )
        tracked = TrackedRequest(fitted, slot, record, now + sequence.deadline_s, self._records, timer)
        self._admission.add(tracked)
        self._status.start()
        return tracked

    def release(self, admitted: AdmittedRequest) -> None:
        """See `Dispatcher.release`. No effect after `run`."""
        tracked = self._admission.take(admitted)
        if tracked is not None:
            tracked.cancel()
            self._release(tracked)

    async def run(self, admitted: AdmittedRequest, take: TakeChunk | None = None) -> AsyncGenerator[TokenChunk, None]:
        """See `Dispatcher.run`."""
        tracked = self._admission.take(admitted)
        if tracked is None:
            raise Broken(f"the admitted request {admitted.sequence.id} was run or released before")
        offer = None if take is None else partial(self._offer, tracked, take)
        try:
            if (last := tracked.finish_if_complete()) is not None:
                tracked.timer.stamp(Stage.ADMIT)
                yield last
                return
            await self._wait_for_slot(tracked)
            tracked.timer.stamp(Stage.ADMIT)
            await self._admission.wait_for_burst()
            while True:
                try:
                    reservation = await self._reserve(tracked)
                    async with Attempt(tracked, reservation, self._workers, self._aborts, self._prefill) as attempt:
                        finish = None
                        while finish is None:
                            chunk = await attempt.next(offer)
                            finish = chunk.finish
                            self._on_chunk(tracked, chunk)
                            if finish is None:
                                yield chunk
                    self._admission.leave(tracked)  # the workers are done, however slowly the client reads
                    yield chunk
                    return
                except AttemptFailure as failure:
                    self._on_attempt_failure(tracked, failure)
                except Superseded as error:
                    tracked.on_superseded(error)
        except BatonError as error:
            tracked.fail(error)
            raise
        finally:
            tracked.cancel()
            self._release(tracked)

    def drain(self) -> None:
        """Refuses new sequences from now on."""
        self._draining = True

    async def wait_empty(self) -> None:
        """Waits until no admitted request is left."""
        await self._admission.wait_empty()

    def _release(self, tracked: TrackedRequest) -> None:
        self._admission.release(tracked)
        self._media_budget.release(tracked.sequence.files)
        if self._rates is not None and self._rates.limits_any:
            self._rates.settle(tracked.sequence, tracked.slot.num_served_tokens)

    def _fit_to_workers(self, sequence: SequenceSpec, is_takeover: bool) -> SequenceSpec:
        """Cuts `max_tokens` to what the workers can hold. Raises `Refused` when they can hold none."""
        if self._draining:
            raise Draining("this router is shutting down", retry_after_s=self._limits.retry_after_s)
        if sequence.id in self._admission:
            raise Broken(f"a request with the id {sequence.id} is under way: attempts are fenced by it")
        max_request_tokens = self._workers.max_request_tokens()
        if max_request_tokens is None and is_takeover:
            return sequence  # a takeover waits for workers
        if max_request_tokens is None:
            _, detail = self._workers.readiness()
            raise NoWorkers(detail, retry_after_s=self._limits.retry_after_s)
        if sequence.files and not is_takeover and not self._workers.encodes(sequence.processor):
            raise NoWorkers("no linked pair here serves images", retry_after_s=self._limits.retry_after_s)
        # A pool may hold less than the model's context, which bounds `max_tokens` when the client set none.
        room, stop = max_request_tokens - len(sequence.prompt_tokens), sequence.stop
        num_output_tokens = max(1, stop.min_tokens)
        if room < max(num_output_tokens, len(sequence.emitted)):
            parts = f"{len(sequence.prompt_tokens)} prompt tokens and at least {num_output_tokens} output tokens"
            raise ContextOverflow(f"{parts} do not fit: no worker here holds more than {max_request_tokens} tokens")
        if stop.max_tokens <= room:
            return sequence
        return replace(sequence, stop=replace(stop, max_tokens=room))

    async def _wait_for_slot(self, tracked: TrackedRequest) -> None:
        """Returns when the request may run. Raises `Overloaded` if it had to leave the queue; see `wait_for_model`."""
        if not tracked.granted.is_set():
            try:
                async with asyncio.timeout_at(tracked.deadline):
                    await tracked.granted.wait()
            except TimeoutError:
                raise self._admission.timeout_error(tracked, "ran out of time in the queue") from None
        if (refusal := tracked.slot.refusal) is not None:
            ADMISSION_TOTAL.labels("refused", refusal.code, tracked.sequence.tenant).inc()
            raise refusal

    def _on_chunk(self, tracked: TrackedRequest, chunk: TokenChunk) -> None:
        """Counts and charges the tokens of a chunk."""
        num_tokens = len(chunk.tokens)
        self._status.num_tokens += num_tokens
        self.num_tokens += num_tokens
        self._admission.queue.on_tokens(tracked.slot, num_tokens, chunk.num_cached_tokens, self._clock())

    def _offer(self, tracked: TrackedRequest, take: TakeChunk, chunk: TokenChunk) -> bool:
        """A `TakeChunk` that counts what is taken."""
        if not take(chunk):
            return False
        self._on_chunk(tracked, chunk)
        return True

    async def _reserve(self, tracked: TrackedRequest) -> PairReservation:
        request, fingerprint, reservation = tracked.engine_request(), tracked.required_fingerprint, None
        while reservation is None:
            if fingerprint:
                await self._admission.wait_for_model(tracked)
            try:
                reservation = await self._reserver.reserve(
                    request, tracked.avoided, tracked.deadline, fingerprint, tracked.metadata,
                    tracked.sequence.affinity, tracked.sequence.processor, may_start=tracked.last_error is None,
                )  # fmt: skip
            except ReserveFailure as failure:
                tracked.on_reserve_failure(failure.pair)
                raise
            if reservation is None and not fingerprint:
                wait_s = self._limits.reserve.worker_wait_s
                last = None if isinstance(tracked.last_error, NoRoom) else tracked.last_error
                raise last or WorkerLost(f"no linked prefill/decode pair appeared within {wait_s:g} s")
        tracked.on_reserved(reservation)
        return reservation

    def _status_fields(self) -> dict[str, int] | None:
        queue = self._admission.queue
        if not self._admission:
            return None
        waiting = {"queued": queue.num_waiting, "queued_tokens": queue.num_waiting_tokens}
        waiting["suspended"] = queue.num_suspended
        return {"running": queue.num_running, **waiting, "workers_ready": self._workers.num_ready()}

    def _on_attempt_failure(self, tracked: TrackedRequest, failure: AttemptFailure) -> None:
        if failure.unreached and tracked.waits_for_workers(self._clock(), self._limits.reserve.worker_wait_s):
            failure.counted = False  # a request that prefill never had killed nobody
        has_images = not isinstance(failure.error, NeedMedia) or self._may_bring_images(tracked, failure, failure.error)
        may_retry = has_images and (not failure.counted or tracked.num_failures + 1 < self._limits.max_attempts)
        log.warning(
            "attempt_failed",
            request_id=tracked.id.request_id,
            attempt=tracked.id.attempt,
            phase=tracked.state.value,
            code=failure.error.code,
            reason=failure.error.log_text,
            retried=may_retry,
        )
        tracked.on_attempt_failure(failure, may_retry)

    def _may_bring_images(self, tracked: TrackedRequest, failure: AttemptFailure, error: NeedMedia) -> bool:
        """False when no attempt can bring the images that prefill lacks.

        Images that evict each other make an answer late. So these failures have a bound of their own.
        """
        pair, sequence = tracked.pair, tracked.sequence
        if pair is None:
            return True
        self._uploader.on_missing(pair.prefill, sequence.salt, error)
        failure.counted = False
        tracked.num_need_media += 1
        lost = {file.identity for file in sequence.files if file.data is None}
        if lost.isdisjoint(error.identities):
            return tracked.num_need_media <= MAX_NEED_MEDIA
        failure.fault_source = FaultSource.PREFILL  # only a worker that holds them can go on
        tracked.without_files.add(pair.prefill.incarnation)
        others = self._workers.encoders(sequence.processor) - tracked.without_files
        return bool(others) and tracked.num_need_media <= MAX_NEED_MEDIA
