"""A simulated router: both halves of the real one, without a socket. Wired as `services.router.app` wires them.

Clients call `post` and `resume`, which are what `services.router.api.routes` does with a posting; the response is an
ASGI application, as there. `leave` is the end of `services.router.app.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from baton.domain.ids import Incarnation, OwnerId, RequestId
from baton.telemetry.timeline import Moment
from services.router.api.custody import Posting
from services.router.api.delivery import Answer
from services.router.api.fence import Fence
from services.router.api.front import ApiLimits, Memory, build_front
from services.router.api.observer import NullObserver
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.admission import DoorLimits
from services.router.dispatch.booking import BookingLimits
from services.router.dispatch.dispatcher import DispatchLimits, Identity
from services.router.dispatch.fleet import Fleet, FleetLimits
from simulation.book import BookHost, SimBook
from simulation.calls import SimChannels
from simulation.network import Host, Network
from simulation.oracle import Violation
from simulation.parts import MODEL, SIZES, Parts
from simulation.process import Process
from simulation.scenario import MAX_CHOICES
from simulation.texts import text_model
from simulation.trace import Trace

DOOR = DoorLimits(max_running_requests=6, max_queued_requests=8, max_queued_tokens=60)
LIMITS = DispatchLimits(DOOR, BookingLimits(SIZES.promise_s, SIZES.patience_s), SIZES.max_attempts)
LAST_WORDS_S = 1.0
"""As in `services.router.app`."""


@dataclass(frozen=True)
class _Numbered:
    """A listener that hashes by its number, not by its address: sets of them are in the same order in every run."""

    number: int
    call: Callable[[], None]

    def __hash__(self) -> int:
        return self.number

    def __call__(self) -> None:
        self.call()


class SimFleet(Fleet):
    """The real fleet, with listeners that it tells in an order that is always the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._numbers = itertools.count()

    def watch(self, incarnation: Incarnation, on_lost: Callable[[], None]) -> Callable[[], None]:
        return super().watch(incarnation, _Numbered(next(self._numbers), on_lost))


@dataclass(frozen=True, slots=True)
class _Witness:
    """Puts every moment of a request into the trace."""

    trace: Trace
    name: str

    def on_moment(self, id: RequestId, moment: Moment) -> None:
        self.trace.note(self.name, moment.value, id)

    def on_retry(self, id: RequestId) -> None:
        self.trace.note(self.name, "retry", id)


class SimRouter:
    """One life of a router. Made inside its own process. `host` knows the connections of its clients."""

    def __init__(
        self, process: Process, network: Network, book: BookHost, parts: Parts, deadline_s: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.process = process
        self.host = Host(process, {})
        sim_book = SimBook(book, network, process, SIZES.heartbeat_s)
        limits = FleetLimits(SIZES.worker_ttl_s, SIZES.heartbeat_s, SIZES.max_step_age_s)
        self._fleet = SimFleet(sim_book, SimChannels(network, process), MODEL, limits, clock=clock)
        self._aborts = Aborts(self._fleet)
        fence = parts.fence()
        self.writer = parts.writer(sim_book, on_superseded=fence.superseded)
        self.writer.start()
        witness, identity = _Witness(network.trace, process.name), Identity(process.name, MODEL)
        self.dispatcher = parts.dispatcher(self._fleet, self._aborts, self.writer, witness, identity, LIMITS)
        self._open_upper_half(sim_book, fence, parts, deadline_s)
        following = self._fleet.start()

        async def follow() -> None:
            await following

        process.spawn(follow(), "fleet")

    async def post(self, posting: Posting) -> Response:
        """The answer to a new call. Raises `BatonError`."""
        self.dispatcher.refuse_if_full(self._deadline_s)
        reading = await self._front.reader.read(posting)
        answer = Answer(self._front.answers, reading, posting, asyncio.get_running_loop().time())
        self._check_door()
        return answer

    async def resume(self, id: RequestId, last_event_id: str) -> Response:
        """The rest of an earlier answer. Raises `BatonError`."""
        return await self._front.resumption.answer(id, last_event_id, "")

    async def leave(self) -> None:
        """SIGTERM; returns when the process would exit."""
        self._ownership.stop_claiming()
        self._front.carrier.drain()
        self.dispatcher.drain()
        await self._until_empty(SIZES.drain_s)
        await self.host.stop(LAST_WORDS_S)
        await self._front.carrier.close()
        await self._until_empty(LAST_WORDS_S)
        await self.writer.flush(LAST_WORDS_S)
        await self._ownership.close()
        await self._aborts.close()
        await self.writer.close()

    def check_idle(self) -> None:
        """Raises `Violation` if a ticket is still out, or the book does not know all."""
        if self.dispatcher.num_open:
            raise Violation("I9", f"{self.dispatcher.num_open} tickets were never given back")
        if self.writer.num_pending:
            raise Violation("I9", f"{self.writer.num_pending} requests were never written to their end")

    def _open_upper_half(self, book: SimBook, fence: Fence, parts: Parts, deadline_s: float) -> None:
        owner = OwnerId(f"{self.process.name}/{self.process.incarnation:x}")
        limits = ApiLimits(MODEL, SIZES.max_model_len, request_deadline_s=deadline_s)
        memory = Memory(book, self.writer, owner, fence)
        self._deadline_s = deadline_s
        self._front = build_front(text_model(), self.dispatcher, limits, NullObserver(), memory)
        self._ownership = parts.ownership(book, owner, self._front.carrier.take, owner_ttl_s=SIZES.owner_ttl_s)
        self._ownership.start()

    async def _until_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.dispatcher.wait_empty()

    def _check_door(self) -> None:
        """A new call was let in: no more than the door's bounds allow are here, besides those that are carried on."""
        num_carried = MAX_CHOICES * sum(name.startswith("carry-") for name in self.process.tasks())
        most = DOOR.max_running_requests + DOOR.max_queued_requests + num_carried
        if self.dispatcher.num_open > most:
            raise Violation("door", f"{self.dispatcher.num_open} tickets are out, {most} at most may be")
