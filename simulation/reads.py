"""One-sided reads between simulated workers: the real `FakeMover` and `Flight`, driven by the virtual clock.

`Wires` knows which prefill pools exist and gives every decode worker its own view of them, so that a pair's way can be
cut. `SimPuller` stands where `baton.transfer.puller.ThreadedPuller` stands; `_progress` mirrors its `_serve`, without
the thread. Bytes are copied when a read ends, which is when it hurts most.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from baton.domain.ids import PageId, WorkerId
from baton.kv.memory import PageMemory
from baton.transfer.base import OnPullEvent, Pull, SourceInfo
from baton.transfer.fake import TRANSPORT, FakeFabric, FakeMover, FakeSource, Fault, FaultKind
from baton.transfer.flight import Flight
from simulation.process import Process
from simulation.scenario import Noise

TURN_S = 0.01
MEAN_READ_S = 0.004
MAX_LATE_S = 3.0


class SimFabric(FakeFabric):
    """One decode worker's view of the sources. `calm` ends the faults."""

    def __init__(self, rng: Random, noise: Noise) -> None:
        super().__init__()
        self._rng = rng
        self._noise = noise

    def calm(self) -> None:
        """From now on nothing goes wrong by chance."""
        self._noise = Noise()

    def next_fault(self) -> Fault:
        rng, noise = self._rng, self._noise
        delay_s = rng.expovariate(1.0 / MEAN_READ_S)
        if rng.random() < noise.read_lateness:
            delay_s += rng.uniform(0.0, MAX_LATE_S)
        if rng.random() < noise.read_failure:
            return Fault(FaultKind.FAIL, delay_s)
        if rng.random() < noise.read_corruption:
            return Fault(FaultKind.CORRUPT, delay_s)
        return Fault(FaultKind.NONE, delay_s)


@dataclass(slots=True)
class _Source:
    process: Process
    memory: PageMemory
    views: dict[str, FakeSource] = field(default_factory=dict)  # decode name -> what it sees


class Wires:
    """All pools that can be read and all who read. Names are processes' names; a restart replaces its former life."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._sources: dict[str, _Source] = {}
        self._fabrics: dict[str, SimFabric] = {}
        self._cuts: dict[tuple[str, str], float] = {}

    def add_source(self, process: Process, memory: PageMemory) -> bytes:
        """A prefill worker's pool; returns what its peers need to find it."""
        source = self._sources[process.name] = _Source(process, memory)
        for decode, fabric in self._fabrics.items():
            self._show(source, decode, fabric)
        return _key(process)

    def add_reader(self, process: Process) -> SimFabric:
        """A decode worker."""
        fabric = self._fabrics[process.name] = SimFabric(process.rng, self._noise)
        for source in self._sources.values():
            self._show(source, process.name, fabric)
        return fabric

    def died(self, process: Process) -> None:
        """Reads from this process fail."""
        source = self._sources.pop(process.name, None)
        for view in source.views.values() if source else ():
            view.close()
        self._fabrics.pop(process.name, None)

    def cut(self, prefill: str, decode: str, duration_s: float) -> None:
        """Reads of a pair stand still for a while."""
        until = asyncio.get_running_loop().time() + duration_s
        self._cuts[prefill, decode] = max(until, self._cuts.get((prefill, decode), 0.0))
        self._refresh()
        asyncio.get_running_loop().call_at(self._cuts[prefill, decode], self._refresh)

    def calm(self) -> None:
        """From now on nothing goes wrong by chance."""
        self._noise = Noise()
        for fabric in self._fabrics.values():
            fabric.calm()

    def _show(self, source: _Source, decode: str, fabric: SimFabric) -> None:
        process = source.process
        source.views[decode] = FakeSource(fabric, WorkerId(process.name), process.incarnation, source.memory)
        self._refresh()

    def _refresh(self) -> None:
        now = asyncio.get_running_loop().time()
        for prefill, source in self._sources.items():
            for decode, view in source.views.items():
                view.paused = now < self._cuts.get((prefill, decode), 0.0)


class SimPuller:
    """The decode side of the reads of one process."""

    transport = TRANSPORT

    def __init__(self, process: Process, fabric: SimFabric, memory: PageMemory, on_event: OnPullEvent) -> None:
        self._process = process
        self._fabric = fabric
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._mover = FakeMover(fabric, memory, self._loop.time)
        self._on_event = on_event
        self._flights: list[Flight] = []
        self._timer: asyncio.TimerHandle | None = None
        self._reachable: dict[WorkerId, FakeSource] = {}

    def pages_in_flight(self) -> list[PageId]:
        """Local pages into which bytes may still land."""
        return [page for flight in self._flights if not flight.ended for page in flight.pull.local_pages]

    def connect(self, source: SourceInfo) -> None:
        """See `PagePuller.connect`."""
        self._mover.link(source)
        self._reachable[source.worker_id] = self._fabric.sources[source.metadata]

    def path(self, source: WorkerId) -> str:
        """See `ThreadedPuller.path`."""
        return TRANSPORT

    def submit(self, pull: Pull) -> None:
        """See `PagePuller.submit`."""
        flight = Flight(pull, self._loop.time(), self._on_event, self._loop.time)
        self._flights.append(flight)
        self._mover.start(flight)
        self._progress()

    def submit_to(self, pull: Pull, on_event: OnPullEvent) -> None:
        """A link's probe. It ends at once: whoever asked blocks, and virtual time would stand still meanwhile."""
        flight = Flight(pull, self._loop.time(), on_event, self._loop.time)
        source = self._reachable.get(pull.source)
        if source is None or source.paused or source.closed:
            flight.fail("the source cannot be reached")
            return
        for remote, local in zip(pull.remote_pages, pull.local_pages, strict=True):
            self._memory.write([local], source.memory.read([remote]))
        flight.num_bytes = len(pull.local_pages) * self._memory.page_bytes
        flight.land()

    def disconnect(self, source: WorkerId) -> None:
        """See `PagePuller.disconnect`."""
        self._mover.unlink(source)
        self._reachable.pop(source, None)

    def _progress(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._process.alive:
            return
        now = self._loop.time()
        for flight in self._flights:
            if now > flight.deadline:
                flight.expire("past its deadline")
        delay_s = self._mover.progress()
        self._flights = [flight for flight in self._flights if not flight.ended]
        waits = [flight.deadline - now for flight in self._flights if not flight.late]
        if delay_s is not None:
            self._timer = self._loop.call_later(max(TURN_S / 10, min([max(delay_s, TURN_S), *waits])), self._progress)


def _key(process: Process) -> bytes:
    return f"{process.name}:{process.incarnation}".encode()
