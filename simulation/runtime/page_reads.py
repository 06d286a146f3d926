"""One-sided reads between simulated workers: the real `FakeMover` and `ActivePull`, driven by the virtual clock.

`PageNetwork` holds the readable pools and gives every reader its own view of them, so a pair can be cut.
`SimPuller` replaces `baton.transfer.puller.ThreadedPuller`; `_progress` mirrors its `_serve`, without the thread. Bytes
are copied at the end of a read, the worst time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from baton.domain.ids import PageId, WorkerId
from baton.kv.memory import PoolMemory, write_leading
from baton.transfer.active_pull import ActivePull
from baton.transfer.base import OnPullEvent, Pull, SourceInfo
from baton.transfer.fake import TRANSPORT, FakeFabric, FakeMover, FakeSource, PullFault, PullFaultKind
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import LATE, Trace
from simulation.scenario import Noise

TURN_S = 0.01
MEAN_READ_S = 0.004
MAX_LATE_S = 3.0


class SimFabric(FakeFabric):
    """One reader's view of the sources. `stop_faults` ends the faults."""

    def __init__(self, rng: Random, noise: Noise, on_late: Callable[[float], None]) -> None:
        """`on_late` receives the delay of each read that comes late, in seconds."""
        super().__init__()
        self._rng = rng
        self._noise = noise
        self._on_late = on_late

    def stop_faults(self) -> None:
        """Stops random failures."""
        self._noise = Noise()

    def next_fault(self) -> PullFault:
        rng, noise = self._rng, self._noise
        delay_s = rng.expovariate(1.0 / MEAN_READ_S)
        if rng.random() < noise.read_lateness:
            delay_s += rng.uniform(0.0, MAX_LATE_S)
            self._on_late(delay_s)
        if rng.random() < noise.read_failure:
            return PullFault(PullFaultKind.FAIL, delay_s)
        if rng.random() < noise.read_corruption:
            return PullFault(PullFaultKind.CORRUPT, delay_s)
        return PullFault(PullFaultKind.NONE, delay_s)


@dataclass(slots=True)
class _Source:
    process: SimProcess
    memory: PoolMemory
    views: dict[str, FakeSource] = field(default_factory=dict)  # reader's name -> its view


class PageNetwork:
    """All readable pools and their readers, by process name; a restart replaces its former life."""

    def __init__(self, noise: Noise, trace: Trace) -> None:
        self._noise = noise
        self._trace = trace
        self._sources: dict[str, _Source] = {}
        self._fabrics: dict[str, SimFabric] = {}
        self._cuts: dict[tuple[str, str], float] = {}

    def add_source(self, process: SimProcess, memory: PoolMemory) -> bytes:
        """Adds a worker's pool; returns its address for peers."""
        source = self._sources[process.name] = _Source(process, memory)
        for decode, fabric in self._fabrics.items():
            self._show(source, decode, fabric)
        return _key(process)

    def add_reader(self, process: SimProcess) -> SimFabric:
        """Adds a worker that reads."""
        fabric = self._fabrics[process.name] = SimFabric(process.rng, self._noise, partial(self._late, process.name))
        for source in self._sources.values():
            self._show(source, process.name, fabric)
        return fabric

    def on_process_exit(self, process: SimProcess) -> None:
        """Makes reads from this process fail."""
        source = self._sources.pop(process.name, None)
        for view in source.views.values() if source else ():
            view.close()
        self._fabrics.pop(process.name, None)

    def cut(self, one: str, other: str, duration_s: float) -> None:
        """Stalls reads of a pair for a while, in both directions."""
        for pair in ((one, other), (other, one)):
            self._cut(pair, duration_s)

    def _cut(self, pair: tuple[str, str], duration_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = self._cuts[pair] = max(loop.time() + duration_s, self._cuts.get(pair, 0.0))
        self._refresh()
        loop.call_at(until_s, self._end_cut, pair, until_s)

    def stop_faults(self) -> None:
        """Stops random failures."""
        self._noise = Noise()
        for fabric in self._fabrics.values():
            fabric.stop_faults()

    def _show(self, source: _Source, decode: str, fabric: SimFabric) -> None:
        process = source.process
        source.views[decode] = FakeSource(fabric, WorkerId(process.name), process.incarnation, source.memory)
        self._refresh()

    def _end_cut(self, pair: tuple[str, str], until_s: float) -> None:
        """Ends the cut, unless it was prolonged. The loop may run this a rounding error before `until_s`."""
        if self._cuts.get(pair) == until_s:
            del self._cuts[pair]
        self._refresh()

    def _late(self, reader: str, delay_s: float) -> None:
        self._trace.note(reader, f"{LATE}{delay_s:.3f} s, a read")

    def _refresh(self) -> None:
        for prefill, source in self._sources.items():
            for decode, view in source.views.items():
                view.paused = (prefill, decode) in self._cuts


class SimPuller:
    """The reading side of one process."""

    transport = TRANSPORT

    def __init__(self, process: SimProcess, fabric: SimFabric, memory: PoolMemory, on_event: OnPullEvent) -> None:
        self._process = process
        self._fabric = fabric
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._mover = FakeMover(fabric, memory, self._loop.time)
        self._on_event = on_event
        self._active_pulls: list[ActivePull] = []
        self._timer: asyncio.TimerHandle | None = None
        self._reachable: dict[WorkerId, FakeSource] = {}

    def pages_in_flight(self) -> list[PageId]:
        """Local pages that reads in flight may still write."""
        return [page for active in self._active_pulls if not active.ended for page in active.pull.local_pages]

    def connect(self, source: SourceInfo) -> None:
        """See `ThreadedPuller.connect`."""
        self._mover.link(source)
        self._reachable[source.worker_id] = self._fabric.sources[source.metadata]

    def path(self, source: WorkerId) -> str:
        """See `ThreadedPuller.path`."""
        return TRANSPORT

    def submit(self, pull: Pull) -> None:
        """See `ThreadedPuller.submit`."""
        active = ActivePull(pull, self._loop.time(), self._on_event, self._loop.time)
        self._active_pulls.append(active)
        self._mover.start(active)
        self._progress()

    def submit_to(self, pull: Pull, on_event: OnPullEvent) -> None:
        """A link's probe. It ends at once: its caller blocks, and virtual time would stand still."""
        active = ActivePull(pull, self._loop.time(), on_event, self._loop.time)
        source = self._reachable.get(pull.source)
        if source is None or source.paused or source.closed:
            active.fail("the source cannot be reached")
            return
        num_bytes = pull.page_bytes(self._memory)
        write_leading(self._memory, pull.local_pages, source.memory.read(pull.remote_pages, num_bytes))
        active.num_bytes = len(pull.local_pages) * num_bytes
        active.complete()

    def disconnect(self, source: WorkerId) -> None:
        """See `ThreadedPuller.disconnect`."""
        self._mover.unlink(source)
        self._reachable.pop(source, None)

    def _progress(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._process.alive:
            return
        now = self._loop.time()
        for active in self._active_pulls:
            if now > active.deadline:
                active.expire("past its deadline")
        delay_s = self._mover.progress()
        self._active_pulls = [active for active in self._active_pulls if not active.ended]
        waits = [active.deadline - now for active in self._active_pulls if not active.late]
        if delay_s is not None:
            self._timer = self._loop.call_later(max(TURN_S / 10, min([max(delay_s, TURN_S), *waits])), self._progress)


def _key(process: SimProcess) -> bytes:
    return f"{process.name}:{process.incarnation}".encode()
