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
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.loss import AttemptLost, Side, broken, silent, told
from services.router.dispatch.placement import Ask, Avoided, Pair

DRAINING_RETRY_S = 1.0
"""How long a decode worker is left alone that refuses a promise because it drains: its announcement will say so too."""

MIN_BUSY_S = 0.01

MAX_ASKING = 8
"""Of those who stand in line: one question a worker may hang without holding up everybody."""


@dataclass(frozen=True, slots=True)
class Booking:
    """Room on `pair.decode`, for as long as the promise holds; decode has the first `decode_prefix_len` tokens."""

    pair: Pair
    promise_id: str
    decode_prefix_len: int
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class NotNow:
    """The decode worker has no room; ask again after `retry_after_s`."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class BookingLimits:
    """`promise_timeout_s`: for an answer, and for the promise to be used. `patience_s`: without any pair to ask, for
    a request whose client has heard nothing yet; what is under way, or pinned, waits for workers until its deadline."""

    promise_timeout_s: float
    patience_s: float


class PromiseLost(AttemptLost):
    """A promise may have been given on `pair`, but the answer did not arrive."""

    def __init__(self, loss: AttemptLost, pair: Pair) -> None:
        super().__init__(loss.error, loss.fault)
        self.pair = pair


@dataclass(slots=True)
class _Search:
    """One attempt's way from worker to worker; `busy_until`: those that said "not now", and until when."""

    ask: Ask
    began_at: float
    busy_until: dict[Incarnation, float] = field(default_factory=dict)

    def ask_at(self, now: float) -> Ask:
        """What is asked for at `now`; who is not busy any more is asked again."""
        self.busy_until = {incarnation: until for incarnation, until in self.busy_until.items() if until > now}
        return replace(self.ask, busy=frozenset(self.busy_until))


@dataclass(slots=True)
class _Line:
    """Those who wait for room on workers of one fingerprint, or on any; `head`: those of them who ask again."""

    head: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKING))
    num_waiting: int = 0


class Booker:
    """Makes bookings. Owned by one event loop."""

    def __init__(self, fleet: Fleet, aborts: Aborts, limits: BookingLimits) -> None:
        self._fleet = fleet
        self._aborts = aborts
        self._limits = limits
        self._lines: dict[str, _Line] = {}  # by fingerprint
        self._answered_at = 0.0

    async def book(
        self, request: EngineRequest, avoided: Avoided, deadline: float, fingerprint: str = ""
    ) -> Booking | None:
        """A promise on the best pair that has room, waiting for one until `deadline` (of the loop's clock).

        With a `fingerprint` only pairs that have it are asked. None when for `patience_s` there was no pair to ask at
        all, no token was emitted yet, and it is not pinned. Raises `DeadlineExceeded`, `ModelReplaced`, `PromiseLost`,
        or what a worker said is final.
        """
        search = _Search(self._ask(request, avoided, fingerprint), self._now())
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    await self._until_of_its_kind(fingerprint)
                    booking = await self._book(request, search)
                    if booking is not None or not fingerprint:
                        return booking
        except TimeoutError:
            raise self._too_late(request, fingerprint) from None

    async def _book(self, request: EngineRequest, search: _Search) -> Booking | None:
        pin = search.ask.fingerprint
        if pin not in self._lines and (booking := await self._ask_around(request, search)) is not None:
            return booking
        line = self._lines.setdefault(pin, _Line())
        line.num_waiting += 1
        try:
            async with line.head:
                return await self._wait_for_room(request, search)
        finally:
            line.num_waiting -= 1
            if not line.num_waiting:
                del self._lines[pin]

    async def _until_of_its_kind(self, fingerprint: str) -> None:
        while not self._fleet.answers_like(fingerprint):
            await self._fleet.changed()

    def _too_late(self, request: EngineRequest, fingerprint: str) -> BatonError:
        id = request.id.request_id
        if self._fleet.answers_like(fingerprint) or not self._fleet.readiness()[0]:
            return DeadlineExceeded(f"request {id} found no room in time")
        return ModelReplaced(
            f"request {id} was begun by workers with another model, other weights or another page geometry than all "
            "that are here now, and none like them came back in time: ask anew"
        )

    async def _wait_for_room(self, request: EngineRequest, search: _Search) -> Booking | None:
        """Also None when no pair is left that the request is pinned to."""
        pin = search.ask.fingerprint
        patience_s = math.inf if request.num_emitted or pin else self._limits.patience_s
        while (booking := await self._ask_around(request, search)) is None:
            if not self._fleet.answers_like(pin):
                return None
            gives_up_at = max(search.began_at, self._answered_at) + patience_s
            if not search.busy_until and self._now() >= gives_up_at:
                return None
            await self._fleet_change_until(min(search.busy_until.values(), default=gives_up_at))
        return booking

    async def _ask_around(self, request: EngineRequest, search: _Search) -> Booking | None:
        """Asks one pair after another, the best first; None when there is none left that is not busy."""
        while (pair := self._fleet.choose(search.ask_at(self._now()))) is not None:
            answer = await self._promise(request, search.ask, pair)
            self._answered_at = self._now()
            if isinstance(answer, Booking):
                return answer
            search.busy_until[pair.decode.incarnation] = self._answered_at + max(MIN_BUSY_S, answer.retry_after_s)
        return None

    def _ask(self, request: EngineRequest, avoided: Avoided, fingerprint: str) -> Ask:
        max_tokens = request.num_prompt_tokens + request.stop.max_tokens
        keys = {size: page_keys(request.tokens, size, request.salt) for size in self._fleet.page_sizes()}
        return Ask(len(request.tokens), max_tokens, keys, avoided, fingerprint=fingerprint)

    async def _promise(self, request: EngineRequest, ask: Ask, pair: Pair) -> Booking | NotNow:
        """Asks one decode worker. Whatever goes wrong while it is asked, it is told to forget the promise."""
        keys = tuple(ask.keys.get(pair.decode.page_size, ()))
        self._fleet.placed(request.id, pair, len(request.tokens))
        answered = False
        try:
            reply = await self._fleet.decode_stub(pair.decode).Promise(
                self._promise_request(request, keys), timeout=self._limits.promise_timeout_s
            )
            answered = True
        except grpc.aio.AioRpcError as error:
            raise self._lost(broken(error, Side.DECODE), pair) from None
        except asyncio.CancelledError:
            if _cancelled_by_us():
                raise
            raise self._lost(silent(Side.DECODE, "was taken for dead while it was asked"), pair) from None
        finally:
            if not answered:
                self._fleet.settled(request.id)
                self._aborts.send(request.id, pair.decode, "promise unanswered")
        return self._read(reply, request, pair, keys)

    def _read(
        self, reply: decode_pb2.PromiseReply, request: EngineRequest, pair: Pair, keys: tuple[PageKey, ...]
    ) -> Booking | NotNow:
        if reply.HasField("promised"):
            promised = reply.promised
            return Booking(pair, promised.promise_id, promised.decode_prefix_len, keys)
        self._fleet.settled(request.id)
        if reply.HasField("busy"):
            return NotNow(reply.busy.retry_after_s)
        error = decode_failure(reply.refused)
        if isinstance(error, Draining | Overloaded):
            return NotNow(error.retry_after_s or DRAINING_RETRY_S)
        raise self._lost(told(error, Side.DECODE), pair)

    def _lost(self, reason: Exception, pair: Pair) -> Exception:
        if not isinstance(reason, AttemptLost):
            return reason
        if isinstance(reason.error, WorkerLost):
            self._fleet.suspect(pair.decode, reason.error)
        return PromiseLost(reason, pair)

    def _promise_request(self, request: EngineRequest, keys: tuple[PageKey, ...]) -> decode_pb2.PromiseRequest:
        return decode_pb2.PromiseRequest(
            id=encode_id(request.id),
            num_tokens=len(request.tokens),
            page_keys=keys,
            deadline_s=self._limits.promise_timeout_s,
        )

    async def _fleet_change_until(self, wake_at: float) -> None:
        try:
            async with asyncio.timeout_at(wake_at if wake_at < math.inf else None):
                await self._fleet.changed()
        except TimeoutError:
            return

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _cancelled_by_us() -> bool:
    """Whether this task was cancelled, rather than its call by the closing of a lost worker's channel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
