"""Finds a pair of workers for an attempt, and reserves room on its decode worker. Called by `dispatcher`.

`placement` chooses the pairs. A busy decode worker sends the attempt to another one. An attempt that
every decode worker refused waits in a FIFO. The first `MAX_ASKING` entries try again after the workers'
`retry_after_s`, so that a crowd that waits for pages neither overtakes itself nor floods the workers.

Where decode probably has room, prefill starts beside `Reserve` instead of after it. If that decode worker is busy,
another one that is linked to the same prefill worker takes the attempt. With none, prefill gets an abort and the
attempt fails with `NoRoom`; the next one reserves first. No token leaves before there is a reservation.

A sequence that requires a fingerprint waits for room in a queue of its own, so that it never holds up others. So does
one with images. When its last such worker leaves, the search is over: the caller waits for another one.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace

from baton.domain.errors import DeadlineExceeded, Draining, NoRoom, Overloaded, WorkerLost
from baton.domain.ids import AttemptId, Incarnation, PageKey
from baton.domain.request import EngineRequest
from baton.domain.values.quick_init import quick_init
from baton.domain.worker import WorkerRole
from baton.grammar.tokenizer import CAPABILITY
from baton.kv.keys import page_keys
from baton.rpc.codec import decode_failure, encode_id
from baton.rpc.gen import decode_pb2
from baton.rpc.request_metadata import Metadata
from baton.services.router.dispatch.aborts import Aborts
from baton.services.router.dispatch.cache_index.affinity import KeyAffinity
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.placement.query import Avoided, PlacementQuery, needs_of
from baton.services.router.dispatch.prefill.early_start import EarlyStartLimit, has_room_twice
from baton.services.router.dispatch.prefill.prefill_run import PrefillRun, PrefillSpec, StartPrefill
from baton.services.router.dispatch.sessions.session_or_call import send_reserve
from baton.services.router.dispatch.worker_errors import (
    AttemptFailure,
    FaultSource,
    abort_reason,
    classify_reported,
    damaged,
)
from baton.services.router.dispatch.workers import WorkerSet
from baton.telemetry.metrics import EARLY_PREFILLS_TOTAL

DRAINING_RETRY_S = 1.0
"""Pause before a draining decode worker is tried again. Its announcement shows the drain by then."""

MIN_BUSY_S = 0.01

_NUM_RESERVED = EARLY_PREFILLS_TOTAL.labels("reserved")

MAX_ASKING = 8
"""Entries of a wait queue that try concurrently: one call that hangs does not hold up all."""


@quick_init
@dataclass(frozen=True, slots=True)
class PairReservation:
    """Room on `pair.decode` until the reservation ends; decode has the first `decode_prefix_len` tokens cached.

    `num_busy_replies`: of the workers tried before. `prefill_only`: the first token is the last, so that nothing was
    reserved and decode takes no part. `prefill`: has begun, and is the owner's to close; None: it is to start now.
    """

    pair: Pair
    reservation_id: str
    decode_prefix_len: int
    keys: tuple[PageKey, ...]
    num_busy_replies: int = 0
    prefill_only: bool = False
    prefill: PrefillRun | None = None


@dataclass(frozen=True, slots=True)
class DecodeBusy:
    """The decode worker has no room: ask again after `retry_after_s`.

    `no_prompts`: it has none for prompts that it computes itself.
    """

    retry_after_s: float
    no_prompts: bool = False


@dataclass(frozen=True, slots=True)
class ReserveLimits:
    """`reserve_timeout_s`: for the reply, and for the reservation to be used.

    `worker_wait_s`: without any pair, for a request that has emitted no token. One that has, or that requires a
    fingerprint, waits for workers until its deadline.
    """

    reserve_timeout_s: float
    worker_wait_s: float


class ReserveFailure(AttemptFailure):
    """`Reserve` failed on `pair`. The worker may hold a reservation nevertheless.

    `early`: what ended a prefill that had begun before; the next attempt avoids that, too.
    """

    def __init__(self, failure: AttemptFailure, pair: Pair, *, counted: bool = True) -> None:
        super().__init__(failure.error, failure.fault_source, refusal=failure.refusal, counted=counted)
        self.unreached = isinstance(failure.error, WorkerLost)
        self.pair = pair
        self.early: BaseException | None = None

    def avoid(self, avoided: Avoided, pair: Pair) -> Avoided:
        avoided = super().avoid(avoided, pair)
        return self.early.avoid(avoided, pair) if isinstance(self.early, AttemptFailure) else avoided


@dataclass(slots=True)
class _Search:
    """One attempt's search for a pair. `busy_until`: decode workers without room, and until when.

    `may_start`: prefill may start before there is a reservation. `prefill`: it has, for this attempt.
    """

    request: EngineRequest
    metadata: Metadata
    query: PlacementQuery
    started_at: float
    deadline: float
    may_start: bool = False
    prefill: PrefillRun | None = None
    num_busy_replies: int = 0
    busy_until: dict[Incarnation, float] = field(default_factory=dict)

    def prefers_handoffs_to(self, pair: Pair) -> bool:
        """Prefers prompts of other workers for a decode worker whose budget for prompts is 0. False if it did before.

        The record that placement goes by is older than the budget.
        """
        avoided = self.query.avoided
        if pair.incarnations in avoided.links:
            return False
        self.query = replace(self.query, avoided=avoided.with_link(pair))
        return True

    def query_at(self, now: float) -> PlacementQuery:
        """The query at `now`, without the workers that are busy still; bound to the worker of a prefill that began."""
        if not self.busy_until and self.prefill is None:
            return self.query
        self.busy_until = {incarnation: until for incarnation, until in self.busy_until.items() if until > now}
        prefill = None if self.prefill is None else self.prefill.worker.incarnation
        return replace(self.query, busy=frozenset(self.busy_until), prefill=prefill)


@dataclass(slots=True)
class _WaitQueue:
    """Attempts that wait for room on workers of one fingerprint and processor, or of any.

    `pollers` bounds the concurrent tries.
    """

    pollers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKING))
    num_waiting: int = 0


class Reserver:
    """Makes reservations. Owned by one event loop."""

    def __init__(
        self, workers: WorkerSet, aborts: Aborts, limits: ReserveLimits, start_prefill: StartPrefill | None = None
    ) -> None:
        """`start_prefill` None: no prompt starts before its reservation."""
        self._start_prefill = start_prefill
        self._early_starts = EarlyStartLimit()
        self._workers = workers
        self._aborts = aborts
        self._limits = limits
        self._wait_queues: dict[tuple[str, str], _WaitQueue] = {}  # by fingerprint and image processor
        self._affinity = KeyAffinity()
        self._replied_at = 0.0
        self._clock = asyncio.get_running_loop().time

    async def reserve(
        self,
        request: EngineRequest,
        avoided: Avoided,
        deadline: float,
        fingerprint: str = "",
        metadata: Metadata = (),
        affinity: str = "",
        processor: str = "",
        may_start: bool = False,
    ) -> PairReservation | None:
        """Reserves room on the best pair, waiting for it until `deadline` (on the loop's clock).

        A `fingerprint` restricts it to pairs that have it, a `processor` to those that encode images with it. Requests
        of one `affinity` prefer the same pair. `may_start`: prefill may start before there is a reservation. None when
        no pair with the `fingerprint` is there; without one, when no pair was there for `worker_wait_s` and no token
        was emitted yet. Raises `DeadlineExceeded`, `ReserveFailure`, or a worker's error that ends the request.
        """
        query = self._query(request, avoided, fingerprint, affinity, processor)
        search = _Search(request, metadata, query, self._clock(), deadline, may_start and not processor)
        try:
            reservation = await self._reserve_or_wait(search)
            if reservation is not None:
                self._affinity.add(affinity, reservation.pair.incarnations)
            return reservation
        except TimeoutError:
            self._end_prefill(search, DeadlineExceeded.code)
            raise DeadlineExceeded(f"request {request.id.request_id} found no room in time") from None
        except BaseException as error:
            if isinstance(error, ReserveFailure) and search.prefill is not None:
                error.early = search.prefill.failure
            self._end_prefill(search, abort_reason(error))
            raise

    async def _reserve_or_wait(self, search: _Search) -> PairReservation | None:
        """Raises `TimeoutError` at the deadline: a reply of a worker is awaited until then, and so is the queue."""
        kind = search.query.fingerprint, search.query.processor
        if kind not in self._wait_queues and (reservation := await self._try_pairs(search)) is not None:
            return reservation
        search.may_start = False  # what is free is for those that wait
        wait_queue = self._wait_queues.setdefault(kind, _WaitQueue())
        wait_queue.num_waiting += 1
        try:
            async with asyncio.timeout_at(search.deadline), wait_queue.pollers:
                return await self._wait_for_room(search)
        finally:
            wait_queue.num_waiting -= 1
            if not wait_queue.num_waiting:
                del self._wait_queues[kind]

    async def _wait_for_room(self, search: _Search) -> PairReservation | None:
        """Returns None also when no pair with the required fingerprint is left."""
        fingerprint, processor = search.query.fingerprint, search.query.processor
        worker_wait_s = math.inf if search.request.num_emitted or fingerprint else self._limits.worker_wait_s
        while (reservation := await self._try_pairs(search)) is None:
            if not self._workers.has_model(fingerprint, processor):
                return None
            give_up_at = max(search.started_at, self._replied_at) + worker_wait_s
            if not search.busy_until and self._clock() >= give_up_at:
                return None
            await self._wait_for_change(min(search.busy_until.values(), default=give_up_at))
        return reservation

    async def _try_pairs(self, search: _Search) -> PairReservation | None:
        """Tries one pair after another, the best first. None when all eligible ones are busy."""
        tried = None
        while (pair := self._workers.choose(search.query_at(self._clock()))) is not None:
            tried = pair
            reply = await self._reserve_on(pair, search)
            self._replied_at = self._clock()
            if isinstance(reply, PairReservation):
                return reply
            search.num_busy_replies += 1
            if reply.no_prompts and search.prefers_handoffs_to(pair):
                continue
            search.busy_until[pair.decode.incarnation] = self._replied_at + max(MIN_BUSY_S, reply.retry_after_s)
            self._check_prefill(search, pair)
        if search.prefill is not None and tried is not None:
            raise self._no_room(search, tried)
        return None

    async def _reserve_on(self, pair: Pair, search: _Search) -> PairReservation | DecodeBusy:
        """Sends `Reserve` to one decode worker. Without a reply the worker gets an abort.

        Prefill alone computes a single token: no decode worker is called, and no page moves.
        """
        request, keys = search.request, tuple(search.query.keys.get(pair.decode.page_size, ()))
        if request.num_emitted + 1 >= request.stop.max_tokens and not pair.local:
            self._workers.on_placed(request.id, pair, search.query)
            return PairReservation(pair, "", 0, keys, search.num_busy_replies, prefill_only=True)
        message = decode_pb2.ReserveRequest(
            id=encode_id(request.id),
            num_tokens=len(request.tokens),
            page_keys=() if pair.local and request.prompt_logprobs is not None else keys,  # cached ones have no scores
            deadline_s=self._limits.reserve_timeout_s,
            max_new_tokens=max(1, request.stop.max_tokens - request.num_emitted),
            computes_prompt=pair.local,
        )
        self._workers.on_placed(request.id, pair, search.query)
        reply = None
        try:
            self._start_if_room(search, pair, keys)
            self._early_starts.on_asked(pair.decode.incarnation, request.id, self._clock())
            reply = await send_reserve(
                self._workers, pair.decode, message, self._limits.reserve_timeout_s, search.metadata, search.deadline
            )
        except AttemptFailure as failure:
            raise self._reserve_failure(failure, pair, request.id) from None
        finally:
            self._early_starts.on_answered(pair.decode.incarnation, request.id)
            if reply is None:
                self._workers.on_ended(request.id)
                self._aborts.send(request.id, pair.decode, "reserve unanswered")
        if reply.HasField("reserved"):
            reserved = reply.reserved
            num_busy = search.num_busy_replies
            if search.prefill is not None:
                _NUM_RESERVED.inc()
            return PairReservation(
                pair, reserved.reservation_id, reserved.decode_prefix_len, keys, num_busy, prefill=search.prefill
            )
        self._workers.on_ended(request.id)
        return self._read_refusal(reply, pair, request.id)

    def _start_if_room(self, search: _Search, pair: Pair, keys: tuple[PageKey, ...]) -> None:
        """Starts prefill if decode probably has room and none waits for it. Later tries are bound to its worker."""
        if self._start_prefill is None or not search.may_start or pair.local:
            return
        search.may_start = False  # the view of the other workers is no newer
        now, request = self._clock(), search.request
        if not self._early_starts.allows(now, pair.decode.incarnation) or not has_room_twice(pair, len(request.tokens)):
            return
        search.prefill = self._start_prefill(PrefillSpec(pair, request, keys, search.deadline, search.metadata))
        self._early_starts.on_started(now)

    def _check_prefill(self, search: _Search, pair: Pair) -> None:
        """Raises what ended a prefill that began before its reservation."""
        if search.prefill is None or (failure := search.prefill.failure) is None:
            return
        if not isinstance(failure, AttemptFailure):
            raise failure
        error = ReserveFailure(failure, pair, counted=failure.counted)
        error.unreached = error.unreached and not search.prefill.accepted
        raise error

    def _no_room(self, search: _Search, pair: Pair) -> ReserveFailure:
        """The failure of an attempt whose prefill began, and for which no decode worker has room."""
        self._early_starts.on_without_room(self._clock())
        self._end_prefill(search, NoRoom.code, "no_room")
        error = NoRoom("no decode worker has room for a prompt that prefill had begun")
        return ReserveFailure(AttemptFailure(error, FaultSource.NOTHING), pair, counted=False)

    def _end_prefill(self, search: _Search, reason: str, outcome: str = "ended") -> None:
        """Ends a prefill that has no reservation. Idempotent."""
        prefill, search.prefill = search.prefill, None
        if prefill is not None:
            if isinstance(failure := prefill.failure, AttemptFailure) and failure.unready:
                self._workers.suspect(prefill.worker, failure.error, search.request.id, refuses=True)
            prefill.close()
            self._aborts.send(search.request.id, prefill.worker, reason)
            EARLY_PREFILLS_TOTAL.labels(outcome).inc()

    def _read_refusal(self, reply: decode_pb2.ReserveReply, pair: Pair, id: AttemptId) -> DecodeBusy:
        """Raises any refusal other than a lack of room, and for a reply that says nothing."""
        if reply.HasField("busy"):
            return DecodeBusy(reply.busy.retry_after_s, reply.busy.no_prompts)
        if not reply.HasField("refused"):
            raise ReserveFailure(damaged("an empty reply of a reservation", FaultSource.DECODE), pair)
        error = decode_failure(reply.refused)
        if isinstance(error, Draining | Overloaded):
            return DecodeBusy(error.retry_after_s or DRAINING_RETRY_S)
        raise self._reserve_failure(classify_reported(error, WorkerRole.DECODE), pair, id)

    def _query(
        self, request: EngineRequest, avoided: Avoided, fingerprint: str, affinity: str, processor: str
    ) -> PlacementQuery:
        max_tokens = request.num_prompt_tokens + request.stop.max_tokens
        keys = {}
        for size in self._workers.page_sizes():
            keys[size] = page_keys(request.tokens, size, request.salt, request.media)
        grammars = CAPABILITY if request.constraint is not None else ""
        return PlacementQuery(
            len(request.tokens), max_tokens, keys, avoided, fingerprint=fingerprint, grammars=grammars,
            needs=needs_of(request), affinity=affinity, last=self._affinity.find(affinity), processor=processor,
        )  # fmt: skip

    def _reserve_failure(self, reason: Exception, pair: Pair, id: AttemptId) -> Exception:
        if not isinstance(reason, AttemptFailure):
            return reason
        if isinstance(reason.error, WorkerLost):
            self._workers.suspect(pair.decode, reason.error, id)
        return ReserveFailure(reason, pair)

    async def _wait_for_change(self, wake_at: float) -> None:
        try:
            async with asyncio.timeout_at(wake_at if wake_at < math.inf else None):
                await self._workers.wait_for_change()
        except TimeoutError:
            return
