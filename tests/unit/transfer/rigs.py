"""Rigs of the contract suite: start sources and pullers of each transport, and record their events."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import pytest

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.trust import ClusterTrust
from baton.kv.memory import PageMemory, PoolMemory
from baton.transfer.base import OnPullEvent, Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.factory import make_puller
from baton.transfer.fake import TRANSPORT, FakeFabric, FakePuller, FakeSource
from baton.transfer.puller import ThreadedPuller
from tests.staged_memory import staged_memory
from tests.unit.transfer.source_process import SourceProcess, SourceSpec, filled_memory, source_info

NIXL_INSTALLED = any(importlib.util.find_spec(package) for package in ("nixl_cu12", "nixl_cu13"))
"""Looked up, not loaded: processes that import this module set UCX's environment before they load NIXL."""
needs_nixl = pytest.mark.skipif(not NIXL_INSTALLED, reason="NIXL is not installed")
TRUST = ClusterTrust(b"the secret of the contract suite")
WAIT_S = 30.0
"""Longest wait for an expected event."""

ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "stream": {},
    "stream-calls": {},
    "nixl": {"UCX_NET_DEVICES": "lo"},
    "nixl-staged": {"UCX_NET_DEVICES": "lo"},
    "nixl-tcp": {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"},
}


class RunningSource(Protocol):
    """A source that a test can stop, kill and corrupt."""

    info: SourceInfo

    def flip(self, page: int, offset: int) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class FakeRunningSource:
    """A `FakeSource` with the interface of a process."""

    def __init__(self, fabric: FakeFabric, spec: SourceSpec) -> None:
        self._memory = filled_memory(spec.num_pages, spec.page_bytes, spec.seed)
        self._source = FakeSource(fabric, spec.worker_id, spec.incarnation, self._memory)
        self.info = source_info(spec, self._memory, "", self._source.metadata())

    def flip(self, page: int, offset: int) -> None:
        self._memory.page(page)[offset] ^= 1

    def kill(self) -> None:
        self._source.close()

    def pause(self) -> None:
        self._source.paused = True

    def resume(self) -> None:
        self._source.paused = False

    def close(self) -> None:
        self._source.close()


class Rig:
    """One transport: starts sources (real processes, but for the fake) and pullers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.transport = name.split("-")[0]
        self._staged = name.endswith("-staged")
        self._fabric = FakeFabric()
        self._closers: list[Callable[[], None]] = []

    def source(self, spec: SourceSpec) -> RunningSource:
        spec = replace(spec, transport=self.transport, environment=ENVIRONMENTS.get(self.name, {}), trust=TRUST)
        fake = self.transport == TRANSPORT
        source: RunningSource = FakeRunningSource(self._fabric, spec) if fake else SourceProcess(spec)
        if self.name == "stream-calls":
            source.info = replace(source.info, metadata=b"")  # no page connections
        self._closers.append(source.close)
        return source

    def memory(self, num_pages: int, page_bytes: int, part_ends: tuple[int, ...] = ()) -> PoolMemory:
        """A puller's pool. `part_ends`: of its pages; none: a page is one part."""
        memory = staged_memory(num_pages, page_bytes) if self._staged else PageMemory(num_pages, page_bytes)
        memory.part_ends = part_ends or memory.part_ends
        return memory

    def puller(self, memory: PoolMemory, on_event: OnPullEvent) -> ThreadedPuller:
        if self.transport == TRANSPORT:
            puller: ThreadedPuller = FakePuller(self._fabric, memory, on_event, TRUST)
        else:
            puller = make_puller(self.transport, WorkerId("decode-0"), Incarnation(0xD), memory, on_event, TRUST)
        self._closers.append(puller.close)
        return puller

    def close(self) -> None:
        """Closes pullers before sources: a vanished reader can end a source's process."""
        while self._closers:
            self._closers.pop()()


class EventLog:
    """Events of a puller by pull; a test can wait for one."""

    def __init__(self) -> None:
        self._events: list[PullEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: PullEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def terminal(self, pull: Pull) -> PullEvent:
        """Waits for the pull's end."""
        return self._wait(lambda: next((event for event in self.of(pull) if is_terminal(event)), None))

    def first(self, pull: Pull) -> PullEvent:
        """Waits for the first event."""
        return self._wait(lambda: next(iter(self.of(pull)), None))

    def of(self, pull: Pull) -> list[PullEvent]:
        return [event for event in self._events if event.pull is pull]

    def assert_orderly(self) -> None:
        """Asserts at most one `LATE` and one terminal event per pull, and no `DONE` after `LATE`."""
        legal = [[outcome] for outcome in PullOutcome] + [[PullOutcome.LATE, PullOutcome.FAILED]]
        for pull in {id(event.pull): event.pull for event in self._events}.values():
            assert [event.outcome for event in self.of(pull)] in legal

    def _wait(self, find: Callable[[], PullEvent | None]) -> PullEvent:
        with self._changed:
            found = self._changed.wait_for(find, WAIT_S)
            assert found is not None, "an event that must come did not"
            return found


def is_terminal(event: PullEvent) -> bool:
    return event.outcome is not PullOutcome.LATE


def page_ids(pages: range | list[int]) -> tuple[PageId, ...]:
    return tuple(PageId(page) for page in pages)
