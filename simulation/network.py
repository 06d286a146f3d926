"""The network between simulated processes: links with delays and losses, cuts, and who listens at which address.

Used by `calls` (gRPC), `book` (Redis) and `world` (faults). A link is what TCP is: what arrives on one call arrives in
order, a message that is lost takes its connection with it, and a silent peer is noticed by keepalive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from simulation.process import Process
from simulation.scenario import Noise
from simulation.trace import Trace

KEEPALIVE_S = 2.0
"""After so long a silence both ends give a connection up (`baton.rpc.client.CLIENT_OPTIONS`)."""

SLOW_FACTOR = 40.0


class Breakable(Protocol):
    """Something that a broken connection ends."""

    def broken(self, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Host:
    """What listens at an address: handlers by full method name."""

    process: Process
    handlers: Mapping[str, Any]


class Link:
    """The way between two names, both directions alike."""

    def __init__(self, rng: Random, noise: Noise) -> None:
        self._rng = rng
        self._noise = noise
        self.cut_from_s = 0.0
        self.cut_until_s = 0.0
        self.calls: dict[Breakable, None] = {}

    def calm(self) -> None:
        """From now on nothing goes wrong by chance."""
        self._noise = Noise(mean_delay_s=self._noise.mean_delay_s)

    def is_cut(self, now: float) -> bool:
        return now < self.cut_until_s

    def delay_s(self) -> float:
        """How long a message takes."""
        slow = SLOW_FACTOR if self._rng.random() < self._noise.slow else 1.0
        return 0.0001 + slow * self._rng.expovariate(1.0 / self._noise.mean_delay_s)

    def arrival(self, now: float) -> float | None:
        """When a message that is sent now arrives; None: never, its connection breaks."""
        if self.is_cut(now):
            return None if now - self.cut_from_s >= KEEPALIVE_S else self.cut_until_s + self.delay_s()
        return None if self._rng.random() < self._noise.loss else now + self.delay_s()

    def second_arrival(self, first: float) -> float | None:
        """When a message arrives again that has arrived at `first`; None: it does not."""
        return first + self._rng.expovariate(1.0) if self._rng.random() < self._noise.duplicate else None


class Network:
    """All links and hosts of a world."""

    def __init__(self, seed: int, noise: Noise, trace: Trace) -> None:
        self._seed = seed
        self._noise = noise
        self._links: dict[tuple[str, str], Link] = {}
        self._is_calm = False
        self.trace = trace
        self.hosts: dict[str, Host] = {}

    def link(self, one: str, other: str) -> Link:
        """The link between two names."""
        ends = (one, other) if one < other else (other, one)
        link = self._links.get(ends)
        if link is None:
            link = self._links[ends] = Link(Random(f"{self._seed} {ends}"), self._noise)
            if self._is_calm:
                link.calm()
        return link

    def calm(self) -> None:
        """From now on nothing goes wrong by chance."""
        self._is_calm = True
        for link in self._links.values():
            link.calm()

    def cut(self, one: str, other: str, duration_s: float) -> None:
        """Nothing gets through between two names for a while; a second cut may make it longer."""
        loop = asyncio.get_running_loop()
        link, now = self.link(one, other), loop.time()
        if not link.is_cut(now):
            link.cut_from_s = now
            loop.call_later(KEEPALIVE_S, self._keepalive, link)
        link.cut_until_s = max(link.cut_until_s, now + duration_s)

    def isolate(self, name: str, names: list[str], duration_s: float) -> None:
        """Cuts one name off from all others."""
        for other in names:
            if other != name:
                self.cut(name, other, duration_s)

    def died(self, process: Process) -> None:
        """A process is gone: its connections are reset, or, half of the time, only keepalive finds out."""
        loop = asyncio.get_running_loop()
        delay_s = process.rng.choice([0.001, KEEPALIVE_S])
        for ends, link in self._links.items():
            if process.name in ends:
                for call in list(link.calls):
                    loop.call_later(delay_s, call.broken, f"{process.name} is gone")

    def _keepalive(self, link: Link) -> None:
        if link.is_cut(asyncio.get_running_loop().time()):
            for call in list(link.calls):
                call.broken("keepalive")
