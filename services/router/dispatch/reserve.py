"""Finds a pair of workers for an attempt, and room on its decode worker. Called by `dispatcher`; `placement` chooses.

"Not now" from one decode worker sends the attempt to another. Whom all have told "not now" stands in line: first come,
first served, and only the first few ask again, when the workers said that it is worth it, so that a crowd that waits
for pages neither overtakes itself nor drowns the workers in questions. Who is pinned to workers that are not there
waits outside the line, and for room on them in a line of their own: they must not hold up those who could be served.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace

import grpc

from baton.domain.errors import BatonError, DeadlineExceeded, Draining, ModelReplaced, Overloaded, WorkerLost
from baton.domain.ids import Incarnation, PageKey
from baton.domain.request import EngineRequest
from baton.kv.keys import page_keys
from baton.rpc.codec import decode_failure, encode_id
from baton.rpc.gen import decode_pb2
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.placement import Avoided, Pair, PlacementQuery
from services.router.dispatch.worker_errors import (
    AttemptFailure,
    Side,
    classify_reported,
    classify_rpc_error,
    lost_worker,
)
from services.router.dispatch.workers import WorkerSet

DRAINING_RETRY_S = 1.0
"""How long a decode worker is left alone that refuses a promise because it drains: its announcement will say so too."""

MIN_BUSY_S = 0.01

MAX_ASKING = 8
"""Of those who stand in line: one question a worker may hang without holding up everybody."""


@dataclass(frozen=True, slots=True)
class PairReservation:
    """Room on `pair.decode`, for as long as the promise holds; decode has the first `decode_prefix_len` tokens."""

    pair: Pair
    reservation_id: str
    decode_prefix_len: int
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class DecodeBusy:
    """The decode worker has no room; ask again after `retry_after_s`."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class ReserveLimits:
    """`reserve_timeout_s`: for an answer, and for the promise to be used. `worker_wait_s`: without any pair to ask, for
    a request whose client has heard nothing yet; what is under way, or pinned, waits for workers until its deadline."""

    reserve_timeout_s: float
    worker_wait_s: float


class ReserveFailure(AttemptFailure):
    """A promise may have been given on `pair`, but the answer did not arrive."""

    def __init__(self, failure: AttemptFailure, pair: Pair) -> None:
        super().__init__(failure.error, failure.fault_source)
        self.pair = pair


@dataclass(slots=True)
class _Search:
    """One attempt's way from worker to worker; `busy_until`: those that said "not now", and until when."""

    query: PlacementQuery
    started_at: float
    busy_until: dict[Incarnation, float] = field(default_factory=dict)

    def query_at(self, now: float) -> PlacementQuery:
        """What is asked for at `now`; who is not busy any more is asked again."""
        self.busy_until = {incarnation: until for incarnation, until in self.busy_until.items() if until > now}
        return replace(self.query, busy=frozenset(self.busy_until))


@dataclass(slots=True)
class _WaitQueue:
    """Those who wait for room on workers of one fingerprint, or on any; `pollers`: those of them who ask again."""

    pollers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKING))
    num_waiting: int = 0


class Reserver:
    """Makes bookings. Owned by one event loop."""

    def __init__(self, workers: WorkerSet, aborts: Aborts, limits: ReserveLimits) -> None:
        self._workers = workers
        self._aborts = aborts
        self._limits = limits
        self._wait_queues: dict[str, _WaitQueue] = {}  # by fingerprint
        self._replied_at = 0.0

    async def reserve(
        self, request: EngineRequest, avoided: Avoided, deadline: float, fingerprint: str = ""
    ) -> PairReservation | None:
        """A promise on the best pair that has room, waiting for one until `deadline` (of the loop's clock).

        With a `fingerprint` only pairs that have it are asked. None when for `worker_wait_s` there was no pair to ask,
        no token was emitted yet, and it has no fingerprint. Raises `DeadlineExceeded`, `ModelReplaced`,
        `ReserveFailure`, or a worker's final error.
        """
        search = _Search(self._query(request, avoided, fingerprint), self._now())
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    await self._wait_for_fingerprint(fingerprint)
                    reservation = await self._reserve_or_wait(request, search)
                    if reservation is not None or not fingerprint:
                        return reservation
        except TimeoutError:
            raise self._timeout_error(request, fingerprint) from None

    async def _reserve_or_wait(self, request: EngineRequest, search: _Search) -> PairReservation | None:
        fingerprint = search.query.fingerprint
        if fingerprint not in self._wait_queues and (reservation := await self._try_pairs(request, search)) is not None:
            return reservation
        wait_queue = self._wait_queues.setdefault(fingerprint, _WaitQueue())
        wait_queue.num_waiting += 1
        try:
            async with wait_queue.pollers:
                return await self._wait_for_room(request, search)
        finally:
            wait_queue.num_waiting -= 1
            if not wait_queue.num_waiting:
                del self._wait_queues[fingerprint]

    async def _wait_for_fingerprint(self, fingerprint: str) -> None:
        while not self._workers.has_fingerprint(fingerprint):
            await self._workers.wait_for_change()

    def _timeout_error(self, request: EngineRequest, fingerprint: str) -> BatonError:
        id = request.id.request_id
        if self._workers.has_fingerprint(fingerprint) or not self._workers.readiness()[0]:
            return DeadlineExceeded(f"request {id} found no room in time")
        return ModelReplaced(
            f"request {id} was begun by workers with another model, other weights or another page geometry than all "
            "that are here now, and none like them came back in time: ask anew"
        )

    async def _wait_for_room(self, request: EngineRequest, search: _Search) -> PairReservation | None:
        """Also None when no pair is left that the request is pinned to."""
        fingerprint = search.query.fingerprint
        worker_wait_s = math.inf if request.num_emitted or fingerprint else self._limits.worker_wait_s
        while (reservation := await self._try_pairs(request, search)) is None:
            if not self._workers.has_fingerprint(fingerprint):
                return None
            give_up_at = max(search.started_at, self._replied_at) + worker_wait_s
            if not search.busy_until and self._now() >= give_up_at:
                return None
            await self._wait_for_change(min(search.busy_until.values(), default=give_up_at))
        return reservation

    async def _try_pairs(self, request: EngineRequest, search: _Search) -> PairReservation | None:
        """Asks one pair after another, the best first; None when there is none left that is not busy."""
        while (pair := self._workers.choose(search.query_at(self._now()))) is not None:
            answer = await self._reserve_on(request, search.query, pair)
            self._replied_at = self._now()
            if isinstance(answer, PairReservation):
                return answer
            search.busy_until[pair.decode.incarnation] = self._replied_at + max(MIN_BUSY_S, answer.retry_after_s)
        return None

    def _query(self, request: EngineRequest, avoided: Avoided, fingerprint: str) -> PlacementQuery:
        max_tokens = request.num_prompt_tokens + request.stop.max_tokens
        keys = {size: page_keys(request.tokens, size, request.salt) for size in self._workers.page_sizes()}
        return PlacementQuery(len(request.tokens), max_tokens, keys, avoided, fingerprint=fingerprint)

    async def _reserve_on(
        self, request: EngineRequest, query: PlacementQuery, pair: Pair
    ) -> PairReservation | DecodeBusy:
        """Asks one decode worker. Whatever goes wrong while it is asked, it is told to forget the reservation."""
        keys = tuple(query.keys.get(pair.decode.page_size, ()))
        self._workers.on_placed(request.id, pair, len(request.tokens))
        replied = False
        try:
            reply = await self._workers.decode_stub(pair.decode).Reserve(
                self._reserve_request(request, keys), timeout=self._limits.reserve_timeout_s
            )
            replied = True
        except grpc.aio.AioRpcError as error:
            raise self._reserve_failure(classify_rpc_error(error, Side.DECODE), pair) from None
        except asyncio.CancelledError:
            if _cancelled_by_us():
                raise
            raise self._reserve_failure(
                lost_worker(Side.DECODE, "was taken for dead while it was asked"), pair
            ) from None
        finally:
            if not replied:
                self._workers.on_ended(request.id)
                self._aborts.send(request.id, pair.decode, "reserve unanswered")
        return self._parse_reply(reply, request, pair, keys)

    def _parse_reply(
        self, reply: decode_pb2.ReserveReply, request: EngineRequest, pair: Pair, keys: tuple[PageKey, ...]
    ) -> PairReservation | DecodeBusy:
        if reply.HasField("reserved"):
            reserved = reply.reserved
            return PairReservation(pair, reserved.reservation_id, reserved.decode_prefix_len, keys)
        self._workers.on_ended(request.id)
        if reply.HasField("busy"):
            return DecodeBusy(reply.busy.retry_after_s)
        error = decode_failure(reply.refused)
        if isinstance(error, Draining | Overloaded):
            return DecodeBusy(error.retry_after_s or DRAINING_RETRY_S)
        raise self._reserve_failure(classify_reported(error, Side.DECODE), pair)

    def _reserve_failure(self, reason: Exception, pair: Pair) -> Exception:
        if not isinstance(reason, AttemptFailure):
            return reason
        if isinstance(reason.error, WorkerLost):
            self._workers.suspect(pair.decode, reason.error)
        return ReserveFailure(reason, pair)

    def _reserve_request(self, request: EngineRequest, keys: tuple[PageKey, ...]) -> decode_pb2.ReserveRequest:
        return decode_pb2.ReserveRequest(
            id=encode_id(request.id),
            num_tokens=len(request.tokens),
            page_keys=keys,
            deadline_s=self._limits.reserve_timeout_s,
        )

    async def _wait_for_change(self, wake_at: float) -> None:
        try:
            async with asyncio.timeout_at(wake_at if wake_at < math.inf else None):
                await self._workers.wait_for_change()
        except TimeoutError:
            return

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _cancelled_by_us() -> bool:
    """Whether this task was cancelled, rather than its call by the closing of a lost worker's channel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
