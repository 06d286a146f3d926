"""A transport inside one process with scripted faults, for tests and the simulator.

`FakeFabric` stands for the network: sources register there, movers read there. `FakeMover` has neither a thread nor a
clock, so the simulator drives it in virtual time. `FakePuller` runs the same mover in a transfer thread.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import PoolMemory, write_leading
from baton.kv.page_tags import TagVerifier
from baton.transfer.active_pull import ActivePull, ClockFn, pull_problem
from baton.transfer.base import OnPullEvent, SourceInfo
from baton.transfer.digest import wrong_positions
from baton.transfer.puller import ThreadedPuller

TRANSPORT = "fake"
_MIN_POLL_S = 0.001


class PullFaultKind(enum.Enum):
    """Kind of a scripted fault."""

    NONE = "none"
    FAIL = "fail"
    CORRUPT = "corrupt"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class PullFault:
    """Script of one pull: after `delay_s` it succeeds, fails or flips a bit in page `position`; or it never ends."""

    kind: PullFaultKind = PullFaultKind.NONE
    delay_s: float = 0.0
    position: int = 0


class FakeSource:
    """Pool of one process on the fabric. Reads of a paused source stand still, those of a closed one fail."""

    transport = TRANSPORT

    def __init__(self, fabric: FakeFabric, worker_id: WorkerId, incarnation: Incarnation, memory: PoolMemory) -> None:
        self.memory = memory
        self.paused = False
        self.closed = False
        self._key = f"{worker_id}:{incarnation}".encode()
        fabric.sources[self._key] = self

    def metadata(self) -> bytes:
        return self._key

    def close(self) -> None:
        self.closed = True


class FakeFabric:
    """Sources by their metadata, and the faults of the next pulls, in order."""

    def __init__(self) -> None:
        self.sources: dict[bytes, FakeSource] = {}
        self._faults: deque[PullFault] = deque()

    def script(self, faults: Iterable[PullFault]) -> None:
        """Gives the next pulls one of `faults` each."""
        self._faults.extend(faults)

    def next_fault(self) -> PullFault:
        return self._faults.popleft() if self._faults else PullFault()


@dataclass(frozen=True, slots=True)
class _Link:
    info: SourceInfo
    source: FakeSource


@dataclass(frozen=True, slots=True)
class _Copy:
    active: ActivePull
    link: _Link
    fault: PullFault
    due_at: float


class FakeMover:
    """Copies pages when they are due. See `baton.transfer.puller.Mover`."""

    def __init__(
        self,
        fabric: FakeFabric,
        memory: PoolMemory,
        clock: ClockFn = time.monotonic,
        trust: ClusterTrust = OPEN_CLUSTER,
    ) -> None:
        self._verifier = TagVerifier(trust)
        self._fabric = fabric
        self._memory = memory
        self._clock = clock
        self._links: dict[WorkerId, _Link] = {}
        self._copies: list[_Copy] = []

    def link(self, source: SourceInfo) -> None:
        found = self._fabric.sources.get(source.metadata)
        if found is None:
            raise LinkBroken(f"{source.worker_id} is not on the fabric")
        self._links[source.worker_id] = _Link(source, found)

    def unlink(self, source: WorkerId) -> None:
        self._links.pop(source, None)  # its copies keep the link until they end

    def start(self, active: ActivePull) -> None:
        link = self._links.get(active.pull.source)
        if link is None:
            active.fail(f"no link to {active.pull.source}")
        elif reason := pull_problem(active.pull, self._memory.num_pages, link.info):
            active.fail(reason)
        else:
            fault = self._fabric.next_fault()
            self._copies.append(_Copy(active, link, fault, self._clock() + fault.delay_s))

    def progress(self) -> float | None:
        self._copies = [copy for copy in self._copies if not self._advance(copy)]
        if not self._copies:
            return None
        return max(_MIN_POLL_S, min(copy.due_at for copy in self._copies) - self._clock())

    def close(self) -> None:
        self._copies.clear()
        self._links.clear()

    def _advance(self, copy: _Copy) -> bool:
        """Returns True if the copy ended."""
        if copy.link.source.closed:
            copy.active.fail("the source is gone")
        elif copy.link.source.paused or self._clock() < copy.due_at or copy.fault.kind is PullFaultKind.HANG:
            return False
        elif copy.fault.kind is PullFaultKind.FAIL:
            copy.active.fail("scripted")
        else:
            self._copy_pages(copy)
        return True

    def _copy_pages(self, copy: _Copy) -> None:
        pull = copy.active.pull
        num_bytes = pull.page_bytes(self._memory)
        contents = copy.link.source.memory.read(pull.remote_pages, num_bytes)
        write_leading(self._memory, pull.local_pages, contents)
        if copy.fault.kind is PullFaultKind.CORRUPT:
            self._flip_bit(pull.local_pages[copy.fault.position])
        copy.active.num_bytes = len(pull.local_pages) * num_bytes
        every = slice(0, len(pull.local_pages))
        copy.active.complete(wrong_positions(self._memory, pull, every, self._verifier, copy.active.found))

    def _flip_bit(self, page: PageId) -> None:
        content = bytearray(self._memory.read([page])[0])
        content[0] ^= 1
        self._memory.write([page], [memoryview(content)])


class FakePuller(ThreadedPuller):
    """A `FakeMover` in its own transfer thread, on the real clock."""

    def __init__(
        self, fabric: FakeFabric, memory: PoolMemory, on_event: OnPullEvent, trust: ClusterTrust = OPEN_CLUSTER
    ) -> None:
        def make_mover(wake: Callable[[], None]) -> FakeMover:
            return FakeMover(fabric, memory, trust=trust)

        super().__init__(TRANSPORT, memory.part_ends, make_mover, on_event)
