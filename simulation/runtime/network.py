"""The network between simulated processes: links with delays and losses, cuts, and who listens at which address.

Used by `grpc_calls` (gRPC), `store` (Redis) and `cluster` (faults). A link is what TCP is: what arrives on one call
arrives in order, a message that is lost takes its connection with it, and a silent peer is noticed by keepalive, which
needs both directions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from baton.rpc.channel_pool import PING_INTERVAL_S, PING_TIMEOUT_S
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import Trace
from simulation.scenario import Noise

KEEPALIVE_S = PING_INTERVAL_S + PING_TIMEOUT_S
"""After so long a silence both ends give a connection up, in the worst case: it began right after an answered ping."""

SLOW_FACTOR = 40.0
SLOW_LINK_S = 0.15
"""What a message takes more, on average, on a link that is slow for a while."""

RESET_S = 0.001


class BreakableCall(Protocol):
    """Something that a broken connection ends."""

    def on_connection_lost(self, why: str) -> None: ...


class Endpoint:
    """What listens at an address: handlers by full method name, and the calls that it serves."""

    def __init__(self, process: SimProcess, handlers: Mapping[str, Any]) -> None:
        self.process = process
        self.handlers = handlers
        self.serving: dict[asyncio.Task[None], None] = {}
        self._closing = False

    @property
    def listens(self) -> bool:
        return self.process.alive and not self._closing

    def add_call(self, task: asyncio.Task[None]) -> None:
        """A call is being served by `task`."""
        self.serving[task] = None
        task.add_done_callback(lambda done: self.serving.pop(done, None))

    async def stop(self, grace_s: float) -> None:
        """As `grpc.aio.Server.stop`: takes no call, waits for those it serves, and cancels what is left."""
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
    """The way between two names. Delays and losses are alike in both directions, cuts need not be."""

    def __init__(self, rng: Random, noise: Noise) -> None:
        self._rng = rng
        self._noise = noise
        self._cuts: dict[str, _Cut] = {}  # by the sender who is not heard
        self._slow_until_s = 0.0
        self.calls: dict[BreakableCall, None] = {}

    def stop_faults(self) -> None:
        """From now on nothing goes wrong by chance."""
        self._noise = Noise(mean_delay_s=self._noise.mean_delay_s)

    def cut(self, sender: str, now: float, duration_s: float) -> None:
        """What `sender` sends does not arrive for a while; a second cut may make it longer."""
        cut = self._cuts.get(sender)
        from_s, until_s = (cut.from_s, cut.until_s) if cut is not None and now < cut.until_s else (now, now)
        self._cuts[sender] = _Cut(from_s, max(until_s, now + duration_s))

    def slow_down(self, until_s: float) -> None:
        """Every message takes longer for a while."""
        self._slow_until_s = max(until_s, self._slow_until_s)

    def keepalive_expired(self, now: float) -> bool:
        """Whether keepalive has given the connection up, and no other can be made."""
        return any(now < cut.until_s and now - cut.from_s >= KEEPALIVE_S for cut in self._cuts.values())

    def is_cut(self, sender: str, now: float) -> bool:
        """Whether what `sender` sends now is held up."""
        cut = self._cuts.get(sender)
        return cut is not None and now < cut.until_s

    def delay_s(self, now: float) -> float:
        """How long a message takes."""
        slow = SLOW_FACTOR if self._rng.random() < self._noise.slow else 1.0
        late_s = self._rng.expovariate(1.0 / SLOW_LINK_S) if now < self._slow_until_s else 0.0
        return 0.0001 + slow * self._rng.expovariate(1.0 / self._noise.mean_delay_s) + late_s

    def arrival(self, sender: str, now: float) -> float | None:
        """When a message that is sent now arrives; None: never, its connection breaks."""
        if self.keepalive_expired(now):
            return None
        if self.is_cut(sender, now):
            return self._cuts[sender].until_s + self.delay_s(now)
        return None if self._rng.random() < self._noise.loss else now + self.delay_s(now)

    def duplicate_arrival(self, first: float) -> float | None:
        """When a message arrives again that has arrived at `first`; None: it does not."""
        return first + self._rng.expovariate(1.0) if self._rng.random() < self._noise.duplicate else None


class SimNetwork:
    """All links and hosts of a world."""

    def __init__(self, seed: int, noise: Noise, trace: Trace) -> None:
        self._seed = seed
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
            link = self._links[ends] = SimLink(Random(f"{self._seed} {ends}"), self._noise)
            if self._is_calm:
                link.stop_faults()
        return link

    def stop_faults(self) -> None:
        """From now on nothing goes wrong by chance."""
        self._is_calm = True
        for link in self._links.values():
            link.stop_faults()

    def cut(self, one: str, other: str, duration_s: float) -> None:
        """Nothing gets through between two names for a while."""
        self.cut_one_way(one, other, duration_s)
        self.cut_one_way(other, one, duration_s)

    def cut_one_way(self, sender: str, receiver: str, duration_s: float) -> None:
        """What `sender` sends does not reach `receiver` for a while; the other direction works, until keepalive."""
        loop, link = asyncio.get_running_loop(), self.link(sender, receiver)
        link.cut(sender, loop.time(), duration_s)
        loop.call_later(KEEPALIVE_S + RESET_S, self._keepalive, link)

    def slow_down(self, one: str, other: str, duration_s: float) -> None:
        """Messages between two names take long for a while."""
        self.link(one, other).slow_down(asyncio.get_running_loop().time() + duration_s)

    def isolate(self, name: str, names: list[str], duration_s: float) -> None:
        """Cuts one name off from all others."""
        for other in names:
            if other != name:
                self.cut(name, other, duration_s)

    def on_process_exit(self, process: SimProcess, cleanly: bool) -> None:
        """A process is gone: its connections are reset, or, for every second one that did not leave `cleanly`, only
        keepalive finds out."""
        loop = asyncio.get_running_loop()
        delay_s = RESET_S if cleanly else process.rng.choice([RESET_S, KEEPALIVE_S])
        for ends, link in self._links.items():
            if process.name in ends:
                for call in list(link.calls):
                    loop.call_later(delay_s, call.on_connection_lost, f"{process.name} is gone")

    def _keepalive(self, link: SimLink) -> None:
        if link.keepalive_expired(asyncio.get_running_loop().time()):
            for call in list(link.calls):
                call.on_connection_lost("keepalive")
