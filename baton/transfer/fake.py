"""A transfer inside one process, with scriptable faults: for service tests and the simulator.

`FakeFabric` stands for the network: sources register there, movers read there. `FakeMover` has no thread and no clock
of its own, so the simulator can drive it in virtual time; `FakePuller` is the same mover in a transfer thread.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.kv.memory import PoolMemory
from baton.transfer.base import OnPullEvent, SourceInfo
from baton.transfer.digest import mismatches
from baton.transfer.flight import Clock, Flight, why_impossible
from baton.transfer.puller import ThreadedPuller

TRANSPORT = "fake"
_TURN_S = 0.001


class FaultKind(enum.Enum):
    """What goes wrong with a pull."""

    NONE = "none"
    FAIL = "fail"
    CORRUPT = "corrupt"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Fault:
    """One pull's fate: after `delay_s` it fails, or lands with a bit flipped in page `position`, or never ends."""

    kind: FaultKind = FaultKind.NONE
    delay_s: float = 0.0
    position: int = 0


class FakeSource:
    """One process's pool on the fabric. Peers see nothing of a paused source, and an end of a closed one."""

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
    """What a network would be: the sources by their metadata, and the faults that the next pulls meet, in order."""

    def __init__(self) -> None:
        self.sources: dict[bytes, FakeSource] = {}
        self._faults: deque[Fault] = deque()

    def script(self, faults: Iterable[Fault]) -> None:
        """The next pulls, one each, meet `faults`; those after them meet none."""
        self._faults.extend(faults)

    def next_fault(self) -> Fault:
        return self._faults.popleft() if self._faults else Fault()


@dataclass(frozen=True, slots=True)
class _Link:
    info: SourceInfo
    source: FakeSource


@dataclass(frozen=True, slots=True)
class _Move:
    flight: Flight
    link: _Link
    fault: Fault
    due: float


class FakeMover:
    """Copies pages by memcpy when they are due. See `baton.transfer.puller.Mover`."""

    def __init__(self, fabric: FakeFabric, memory: PoolMemory, clock: Clock = time.monotonic) -> None:
        self._fabric = fabric
        self._memory = memory
        self._clock = clock
        self._links: dict[WorkerId, _Link] = {}
        self._moves: list[_Move] = []

    def link(self, source: SourceInfo) -> None:
        found = self._fabric.sources.get(source.metadata)
        if found is None:
            raise LinkBroken(f"{source.worker_id} is not on the fabric")
        self._links[source.worker_id] = _Link(source, found)

    def unlink(self, source: WorkerId) -> None:
        self._links.pop(source, None)  # its moves hold the link until they end

    def start(self, flight: Flight) -> None:
        link = self._links.get(flight.pull.source)
        if link is None:
            flight.fail(f"no link to {flight.pull.source}")
        elif reason := why_impossible(flight.pull, self._memory.num_pages, link.info):
            flight.fail(reason)
        else:
            fault = self._fabric.next_fault()
            self._moves.append(_Move(flight, link, fault, self._clock() + fault.delay_s))

    def progress(self) -> float | None:
        self._moves = [move for move in self._moves if not self._advance(move)]
        if not self._moves:
            return None
        return max(_TURN_S, min(move.due for move in self._moves) - self._clock())

    def close(self) -> None:
        self._moves.clear()
        self._links.clear()

    def _advance(self, move: _Move) -> bool:
        """Whether the move ended."""
        if move.link.source.closed:
            move.flight.fail("the source is gone")
        elif move.link.source.paused or self._clock() < move.due or move.fault.kind is FaultKind.HANG:
            return False
        elif move.fault.kind is FaultKind.FAIL:
            move.flight.fail("scripted")
        else:
            self._copy(move)
        return True

    def _copy(self, move: _Move) -> None:
        pull = move.flight.pull
        self._memory.write(pull.local_pages, move.link.source.memory.read(pull.remote_pages))
        if move.fault.kind is FaultKind.CORRUPT:
            self._flip_a_bit(pull.local_pages[move.fault.position])
        move.flight.num_bytes = len(pull.local_pages) * self._memory.page_bytes
        move.flight.land([] if pull.digests is None else mismatches(self._memory, pull.local_pages, pull.digests))

    def _flip_a_bit(self, page: PageId) -> None:
        content = bytearray(self._memory.read([page])[0])
        content[0] ^= 1
        self._memory.write([page], [memoryview(content)])


class FakePuller(ThreadedPuller):
    """A `FakeMover` in a transfer thread of its own, on the real clock."""

    def __init__(self, fabric: FakeFabric, memory: PoolMemory, on_event: OnPullEvent) -> None:
        super().__init__(TRANSPORT, memory.page_bytes, lambda wake: FakeMover(fabric, memory), on_event)
