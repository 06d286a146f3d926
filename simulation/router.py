"""A simulated router: its real lower half (dispatcher, booking, attempts, fleet, book writer) and nothing above it.

Wired as `services.router.app.open_lower_half` wires it. Clients call `admit` and `run`, as the API does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.domain.ids import Incarnation, RequestId
from baton.state.base import StateBook
from baton.state.writer import BookWriter
from baton.telemetry.timeline import Moment
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.admission import DoorLimits
from services.router.dispatch.booking import BookingLimits
from services.router.dispatch.dispatcher import DispatchLimits, Identity, TokenDispatcher
from services.router.dispatch.fleet import Fleet, FleetLimits
from simulation.book import SimBook
from simulation.calls import SimChannels
from simulation.network import Network
from simulation.oracle import Violation
from simulation.parts import MODEL, SIZES
from simulation.process import Process
from simulation.trace import Trace

LIMITS = DispatchLimits(
    door=DoorLimits(max_running_requests=6, max_queued_requests=16, max_queued_tokens=1000),
    booking=BookingLimits(SIZES.promise_s, SIZES.patience_s),
    max_attempts=SIZES.max_attempts,
)


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

    def on_moment(self, id: RequestId, moment: Moment) -> None:
        self.trace.note("router-0", moment.value, id)

    def on_retry(self, id: RequestId) -> None:
        self.trace.note("router-0", "retry", id)


class SimRouter:
    """One life of the router. Made inside its own process."""

    def __init__(self, process: Process, network: Network, book: StateBook, clock: Callable[[], float]) -> None:
        self.process = process
        sim_book = SimBook(book, network, process, SIZES.heartbeat_s)
        limits = FleetLimits(SIZES.worker_ttl_s, SIZES.heartbeat_s, SIZES.max_step_age_s)
        self._fleet = SimFleet(sim_book, SimChannels(network, process), MODEL, limits, clock=clock)
        self.writer = BookWriter(sim_book)
        self.writer.start()
        identity = Identity(process.name, MODEL)
        witness = _Witness(network.trace)
        aborts = Aborts(self._fleet)
        self.dispatcher = TokenDispatcher(self._fleet, aborts, self.writer, witness, identity, LIMITS)
        following = self._fleet.start()

        async def follow() -> None:
            await following

        process.spawn(follow(), "fleet")

    def check_idle(self) -> None:
        """Raises `Violation` if a ticket is still out."""
        if self.dispatcher.num_open:
            raise Violation("I9", f"{self.dispatcher.num_open} tickets were never given back")
        if self.writer.num_pending:
            raise Violation("I9", f"{self.writer.num_pending} requests were never written to their end")
