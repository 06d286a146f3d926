"""The network between simulated processes: links with delays and losses, cuts, and who listens at which address.

Used by `grpc_calls` (gRPC), `store` (Redis) and `cluster` (faults). A link behaves like TCP: messages of one
call arrive in order, a lost message breaks its connection, and keepalive, which needs both directions, detects a silent
peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol

from baton.rpc.channel_pool import PING_INTERVAL_S, PING_TIMEOUT_S
from baton.session.wires.wire import Serve
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import LATE, Trace
from simulation.scenario import Noise

KEEPALIVE_S = PING_INTERVAL_S + PING_TIMEOUT_S
"""Longest silence before both ends close a connection: it began right after an answered ping."""

SLOW_FACTOR = 40.0
SLOW_LINK_S = 0.15
"""Mean extra delay of a message on a slow link."""

RESET_S = 0.001

STRAGGLING = 0.25
"""Share of the lost requests that arrive after their sender has given them up: they are in a kernel or on the way."""

STRAGGLES_S = 1.0
"""Longest time from then to the arrival, where no cut holds the request longer."""

LATE_S = 0.25
"""Delay from which on a message is in the trace."""


class BreakableCall(Protocol):
    """A call that a broken connection ends."""

    def on_connection_lost(self, why: str) -> None: ...


class Endpoint:
    """A server at an address: handlers by full method name, and the calls that it serves."""

    def __init__(self, process: SimProcess, handlers: Mapping[str, Any]) -> None:
        self.process = process
        self.handlers = handlers
        self.serving: dict[asyncio.Task[None], None] = {}
        self.sessions: Serve | None = None
        self._closing = False

    @property
    def listens(self) -> bool:
        return self.process.alive and not self._closing

    def add_call(self, task: asyncio.Task[None]) -> None:
        """Registers a call that `task` serves."""
        self.serving[task] = None
        task.add_done_callback(lambda done: self.serving.pop(done, None))

    async def stop(self, grace_s: float) -> None:
        """Like `grpc.aio.Server.stop`: accepts no call, waits for open calls, and cancels the rest."""
        self._closing = True
        if self.serving:
            await asyncio.wait(list(self.serving), timeout=grace_s)
        for task in list(self.serving):
            task.cancel()


@dataclass(frozen=True, slots=True)
class _Cut:
    from_s: float
    until_s: float


class SimLink:
    """The link between two names. Delays and losses apply in both directions, cuts may not."""

    def __init__(self, rng: Random, late_rng: Random, noise: Noise, on_late: Callable[[float], None]) -> None:
        """`late_rng` draws the lost requests that arrive all the same.

        `on_late` receives the delay of each message that is `LATE_S` late or more, in seconds.
        """
        self._rng = rng
        self._late_rng = late_rng
        self._noise = noise
        self._on_late = on_late
        self._cuts: dict[str, _Cut] = {}  # by the sender that is cut off
        self._slow_until_s = 0.0
        self.calls: dict[BreakableCall, None] = {}

    def stop_faults(self) -> None:
        """Stops random failures."""
        self._noise = Noise(mean_delay_s=self._noise.mean_delay_s)

    def cut(self, sender: str, now: float, duration_s: float) -> None:
        """Cuts messages of `sender` for a while; a second cut may prolong it."""
        cut = self._cuts.get(sender)
        from_s, until_s = (cut.from_s, cut.until_s) if cut is not None and now < cut.until_s else (now, now)
        self._cuts[sender] = _Cut(from_s, max(until_s, now + duration_s))

    def slow_down(self, until_s: float) -> None:
        """Slows every message for a while."""
        self._slow_until_s = max(until_s, self._slow_until_s)

    def keepalive_expired(self, now: float) -> bool:
        """True if keepalive has closed the connection and none can be opened."""
        return any(now < cut.until_s and now - cut.from_s >= KEEPALIVE_S for cut in self._cuts.values())

    def is_cut(self, sender: str, now: float) -> bool:
        """True if messages of `sender` are held now."""
        cut = self._cuts.get(sender)
        return cut is not None and now < cut.until_s

    def delay_s(self, now: float) -> float:
        """Delay of a message."""
        slow = SLOW_FACTOR if self._rng.random() < self._noise.slow else 1.0
        late_s = self._rng.expovariate(1.0 / SLOW_LINK_S) if now < self._slow_until_s else 0.0
        delay_s = 0.0001 + slow * self._rng.expovariate(1.0 / self._noise.mean_delay_s) + late_s
        if delay_s >= LATE_S:
            self._on_late(delay_s)
        return delay_s

    def arrival(self, sender: str, now: float) -> float | None:
        """Arrival time of a message sent now; None if its connection breaks."""
        if self.keepalive_expired(now):
            return None
        if self.is_cut(sender, now):
            return self._cuts[sender].until_s + self.delay_s(now)
        return None if self._rng.random() < self._noise.loss else now + self.delay_s(now)

    def straggler_arrival(self, held_until_s: float | None, given_up_s: float) -> float | None:
        """Arrival time of a request that its sender has given up; None if it never arrives.

        `held_until_s`: when it would arrive by its delay or its cut; None if its connection broke.
        """
        is_late, late_s = self._late_rng.random() < STRAGGLING, self._late_rng.uniform(0.0, STRAGGLES_S)
        return max(given_up_s + late_s, held_until_s or 0.0) if is_late else None

    def duplicate_arrival(self, first: float) -> float | None:
        """Arrival time of the duplicate of a message that arrived at `first`; None without one."""
        return first + self._rng.expovariate(1.0) if self._rng.random() < self._noise.duplicate else None


class SimNetwork:
    """All links and hosts of a run."""

    def __init__(self, seed: int, noise: Noise, trace: Trace) -> None:
        self.seed = seed
        self._noise = noise
        self._links: dict[tuple[str, str], SimLink] = {}
        self._is_calm = False
        self.trace = trace
        self.hosts: dict[str, Endpoint] = {}

    def link(self, one: str, other: str) -> SimLink:
        """The link between two names."""
        ends = (one, other) if one < other else (other, one)
        link = self._links.get(ends)
        if link is None:
            link = self._links[ends] = SimLink(
                Random(f"{self.seed} {ends}"),
                Random(f"{self.seed} {ends} late"),
                self._noise,
                partial(self._late, f"{ends[0]}|{ends[1]}"),
            )
            if self._is_calm:
                link.stop_faults()
        return link

    def stop_faults(self) -> None:
        """Stops random failures."""
        self._is_calm = True
        for link in self._links.values():
            link.stop_faults()

    def cut(self, one: str, other: str, duration_s: float) -> None:
        """Cuts two names off from each other for a while."""
        self.cut_one_way(one, other, duration_s)
        self.cut_one_way(other, one, duration_s)

    def cut_one_way(self, sender: str, receiver: str, duration_s: float) -> None:
        """Cuts messages from `sender` to `receiver` for a while; the other direction works until keepalive."""
        loop, link = asyncio.get_running_loop(), self.link(sender, receiver)
        link.cut(sender, loop.time(), duration_s)
        loop.call_later(KEEPALIVE_S + RESET_S, self._keepalive, link)

    def slow_down(self, one: str, other: str, duration_s: float) -> None:
        """Slows messages between two names for a while."""
        self.link(one, other).slow_down(asyncio.get_running_loop().time() + duration_s)

    def isolate(self, name: str, names: list[str], duration_s: float) -> None:
        """Cuts one name off from all others."""
        for other in names:
            if other != name:
                self.cut(name, other, duration_s)

    def on_process_exit(self, process: SimProcess, cleanly: bool) -> None:
        """Removes a process: its connections are reset, or, for every second one that did not leave `cleanly`, only
        keepalive detects it."""
        loop = asyncio.get_running_loop()
        delay_s = RESET_S if cleanly else process.rng.choice([RESET_S, KEEPALIVE_S])
        for ends, link in self._links.items():
            if process.name in ends:
                for call in list(link.calls):
                    loop.call_later(delay_s, call.on_connection_lost, f"{process.name} is gone")

    def _late(self, ends: str, delay_s: float) -> None:
        self.trace.note(ends, f"{LATE}{delay_s:.3f} s")

    def _keepalive(self, link: SimLink) -> None:
        if link.keepalive_expired(asyncio.get_running_loop().time()):
            for call in list(link.calls):
                call.on_connection_lost("keepalive")
