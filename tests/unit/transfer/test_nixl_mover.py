"""Decisions of NIXL's mover against an agent with scripted reads. Needs no NIXL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import MemoryKind, PageMemory
from baton.transfer.active_pull import ActivePull
from baton.transfer.base import MemoryRegion, Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.digest import digest_pages
from baton.transfer.nixl_agent import Items, NixlAgent, ReadState
from baton.transfer.nixl_metadata import agent_name, encode_metadata
from baton.transfer.nixl_mover import LATE_POLL_S, MAX_POSTS_PER_LINK, NixlMover
from tests.staged_memory import staged_memory
from tests.unit.transfer.rigs import page_ids

PREFILL = WorkerId("p")
PAGE_BYTES = 4 * 1024 * 1024
NUM_PAGES = 40
PAGES_PER_POST = 4


class Read:
    def __init__(self, local: Items, remote: Items) -> None:
        self.local, self.remote = local.tolist(), remote.tolist()
        self.state = ReadState.IN_PROGRESS
        self.released = False


class ScriptedAgent:
    """Every read stays `post_state` until the test changes it."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.peers: list[str] = []
        self.post_state = ReadState.IN_PROGRESS
        self.closed = False
        self.registered: list[MemoryRegion] = []
        self.remote: list[MemoryRegion] = []
        self.reported: str | None = None

    def transport(self) -> str | None:
        return self.reported

    def register(self, region: MemoryRegion) -> None:
        self.registered.append(region)

    def local_pages(self, region: MemoryRegion, num_bytes: int) -> str:
        return "ours"

    def remote_pages(self, peer: str, region: MemoryRegion, num_bytes: int) -> str:
        self.remote.append(region)
        return f"pages of {peer}"

    def add_peer(self, metadata: bytes) -> str:
        self.peers.append(metadata.decode())
        return self.peers[-1]

    def remove_peer(self, name: str) -> None:
        self.peers.remove(name)

    def read(self, local: Any, local_pages: Items, remote: Any, remote_pages: Items) -> Read:
        self.reads.append(Read(local_pages, remote_pages))
        return self.reads[-1]

    def post(self, read: Read) -> ReadState:
        read.state = self.post_state
        return read.state

    def poll(self, read: Read) -> ReadState:
        return read.state

    def release(self, handle: Any) -> None:
        if isinstance(handle, Read):
            handle.released = True

    def close(self) -> None:
        self.closed = True


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.agent = ScriptedAgent()
        self.paths: dict[WorkerId, str] = {}
        self.memory = PageMemory(NUM_PAGES, PAGE_BYTES)
        self.mover = NixlMover(cast(NixlAgent, self.agent), self.memory, self.paths)
        self.events: list[PullEvent] = []

    def start(self, num_pages: int, digests: Sequence[int] | None = None, source: WorkerId = PREFILL) -> ActivePull:
        pages = page_ids(range(num_pages))
        pull = Pull(len(self.events), source, pages, pages, digests, 10.0)
        active = ActivePull(pull, self.now, self.events.append, lambda: self.now)
        self.mover.start(active)
        return active

    def turns(self, state: ReadState | None = None, count: int = 20) -> float | None:
        """Sets all reads to `state` and runs the mover."""
        delay = None
        for _ in range(count):
            for read in self.agent.reads:
                read.state = read.state if state is None or read.released else state
            delay = self.mover.progress()
        return delay

    def outcomes(self) -> list[PullOutcome]:
        return [event.outcome for event in self.events]


def info(incarnation: int = 1, worker_id: WorkerId = PREFILL, kind: MemoryKind = MemoryKind.DRAM) -> SourceInfo:
    number = Incarnation(incarnation)
    blob = agent_name("source", worker_id, number).encode()
    metadata = encode_metadata(blob, MemoryRegion(0, NUM_PAGES, PAGE_BYTES, 0, kind))
    return SourceInfo(worker_id, number, "", "nixl", metadata, 4096, NUM_PAGES, PAGE_BYTES)


@pytest.fixture
def world() -> World:
    world = World()
    world.mover.link(info())
    return world


def test_a_long_pull_is_posted_in_pieces_within_a_window(world):
    world.start(30)
    world.turns()
    assert [len(read.local) for read in world.agent.reads] == [PAGES_PER_POST] * MAX_POSTS_PER_LINK
    assert world.turns(ReadState.DONE) is None
    assert [page for read in world.agent.reads for page in read.local] == list(range(30))
    assert max(len(read.local) for read in world.agent.reads) == PAGES_PER_POST
    assert world.outcomes() == [PullOutcome.DONE]
    assert world.events[0].num_bytes == 30 * PAGE_BYTES
    assert all(read.released for read in world.agent.reads)


def test_a_short_pull_gets_through_beside_a_long_one(world):
    world.agent.post_state = ReadState.DONE
    long, short = world.start(40), world.start(1)
    world.turns(count=2)
    assert (short.ended, long.ended) == (True, False)


def test_nothing_more_is_posted_for_a_late_pull_and_its_pages_stay_taken(world):
    active = world.start(40)
    world.turns()
    active.expire("past its deadline")
    world.agent.reads[0].state = ReadState.DONE
    assert world.turns() == LATE_POLL_S
    assert len(world.agent.reads) == MAX_POSTS_PER_LINK
    assert world.outcomes() == [PullOutcome.LATE]
    world.turns(ReadState.DONE)
    assert world.outcomes() == [PullOutcome.LATE, PullOutcome.FAILED]


def test_a_late_pull_of_which_nothing_was_posted_ends_at_once(world):
    world.start(40)
    world.turns()
    waiting = world.start(1)
    waiting.expire("past its deadline")
    world.turns()
    assert world.outcomes() == [PullOutcome.LATE, PullOutcome.FAILED]
    assert world.events[1].pull is waiting.pull


def test_a_disconnect_fails_each_pull_when_its_own_reads_have_ended(world):
    world.start(4)
    world.start(4)
    world.turns()
    world.agent.reads[0].state = ReadState.DISCONNECTED
    world.turns()
    assert world.outcomes() == [PullOutcome.FAILED]
    assert world.agent.peers == ["source:p:1"]  # the other read is still polled
    world.agent.reads[1].state = ReadState.DISCONNECTED
    world.turns()
    assert world.outcomes() == [PullOutcome.FAILED] * 2
    assert world.agent.peers == []
    world.start(1)
    assert "no link" in world.events[-1].reason


def test_an_error_that_proves_nothing_keeps_the_pages(world):
    world.start(4)
    world.turns()
    world.turns(ReadState.UNKNOWN)
    assert world.outcomes() == [PullOutcome.LATE]
    with pytest.raises(LinkBroken, match="have not ended"):
        world.mover.link(info())
    world.mover.link(info(incarnation=2))
    world.turns(ReadState.DISCONNECTED)
    assert world.outcomes() == [PullOutcome.LATE, PullOutcome.FAILED]
    assert world.agent.peers == ["source:p:2"]


def test_a_new_incarnation_takes_over_while_old_reads_end(world):
    world.start(4)
    world.turns()
    world.mover.link(info(incarnation=2))
    world.start(4)
    world.turns()
    assert sorted(world.agent.peers) == ["source:p:1", "source:p:2"]
    world.turns(ReadState.DONE)
    assert world.outcomes() == [PullOutcome.DONE] * 2
    assert world.agent.peers == ["source:p:2"]


def test_reconnecting_keeps_a_link_in_use_and_renews_an_idle_one(world):
    world.start(4)
    world.turns()
    world.mover.link(info())
    assert world.agent.peers == ["source:p:1"]
    world.turns(ReadState.DONE)
    assert world.outcomes() == [PullOutcome.DONE]
    world.mover.link(info())
    assert world.agent.peers == ["source:p:1"]


def test_a_stuck_source_holds_up_no_other(world):
    other = WorkerId("q")
    world.mover.link(info(worker_id=other))
    world.start(40)
    world.turns()
    active = world.start(2, source=other)
    world.turns()
    world.agent.reads[-1].state = ReadState.DONE
    world.turns()
    assert active.ended


def test_positions_of_corrupt_pages_count_from_the_start_of_the_pull(world):
    world.agent.post_state = ReadState.DONE
    digest = 0x1234  # not that of a page of zeros
    world.start(9, [digest] * 9)
    world.turns()
    assert world.outcomes() == [PullOutcome.CORRUPT]
    assert world.events[0].corrupt == tuple(range(9))


def test_pages_of_a_post_are_read_in_the_order_of_their_addresses(world):
    """Neighbours in both memories are one copy then. Positions are still those of the pull."""
    local, remote = page_ids([9, 8, 7, 3, 2, 30]), page_ids([21, 20, 19, 4, 39, 38])
    good = digest_pages(world.memory, local)
    wrong = [digest ^ (position == 1) for position, digest in enumerate(good)]
    pull = Pull(0, PREFILL, remote, local, wrong, 10.0)
    world.mover.start(ActivePull(pull, world.now, world.events.append, lambda: world.now))
    world.turns(ReadState.DONE)
    pairs = [list(zip(read.remote, read.local, strict=True)) for read in world.agent.reads]
    assert pairs == [[(4, 3), (19, 7), (20, 8), (21, 9)], [(38, 30), (39, 2)]]
    assert world.events[0].corrupt == (1,)


def test_a_path_is_what_ucx_reports_after_the_first_read(world):
    world.agent.reported = "tcp"
    world.start(1)
    world.turns()
    assert PREFILL not in world.paths, "UCX may still choose another one"
    world.turns(ReadState.DONE)
    assert world.paths[PREFILL] == "nixl/ucx (tcp)"


def test_a_link_that_is_taken_back_has_a_path_again(world):
    world.agent.reported = "cma"
    world.start(2 * PAGES_PER_POST)
    world.turns()
    world.agent.reads[0].state = ReadState.DONE
    world.turns()
    assert world.paths[PREFILL] == "nixl/ucx (cma)"
    world.mover.link(info())
    assert PREFILL not in world.paths
    world.turns(ReadState.DONE)
    assert world.paths[PREFILL] == "nixl/ucx (cma)"


def test_a_path_is_unknown_however_fast_a_read_was(world):
    """Without a report. A read that is complete when its post returns was once taken for a kernel copy."""
    world.agent.post_state = ReadState.DONE
    world.start(PAGES_PER_POST)
    world.turns()
    assert world.outcomes() == [PullOutcome.DONE]
    assert world.paths[PREFILL] == "nixl/ucx (unknown)"


@pytest.mark.parametrize("position", [0, 8, 20, -1])
def test_damaged_metadata_is_refused(world, position):
    metadata = bytearray(info().metadata)
    metadata[position] ^= 1
    damaged = SourceInfo(PREFILL, Incarnation(1), "", "nixl", bytes(metadata), 4096, NUM_PAGES, PAGE_BYTES)
    with pytest.raises(LinkBroken, match="damaged"):
        World().mover.link(damaged)


def test_metadata_of_another_incarnation_is_refused(world):
    mixed = SourceInfo(PREFILL, Incarnation(9), "", "nixl", info().metadata, 4096, NUM_PAGES, PAGE_BYTES)
    with pytest.raises(LinkBroken, match="not of source:p:9"):
        world.mover.link(mixed)
    assert world.agent.peers == []


@pytest.mark.parametrize(("digest", "outcome"), [(None, PullOutcome.DONE), (7, PullOutcome.CORRUPT)])
def test_device_pages_are_registered_and_their_digests_checked(digest, outcome):
    world = World()
    device = staged_memory(NUM_PAGES, PAGE_BYTES, MemoryKind.VRAM)
    world.mover = NixlMover(cast(NixlAgent, world.agent), device, world.paths)
    assert [region.kind for region in world.agent.registered] == [MemoryKind.DRAM, MemoryKind.VRAM]
    world.mover.link(info())
    world.start(1, digest_pages(device, page_ids([0])) if digest is None else [digest])
    world.turns()
    world.turns(ReadState.DONE)
    assert world.outcomes() == [outcome]


@pytest.mark.parametrize(("here", "there"), [(MemoryKind.VRAM, MemoryKind.DRAM), (MemoryKind.DRAM, MemoryKind.VRAM)])
def test_a_read_of_device_memory_has_no_presumed_path(here, there):
    world = World()
    world.agent.post_state = ReadState.DONE
    memory = staged_memory(NUM_PAGES, PAGE_BYTES, here)
    world.mover = NixlMover(cast(NixlAgent, world.agent), memory, world.paths)
    world.mover.link(info(kind=there))
    assert world.agent.remote[-1].kind is there
    world.start(PAGES_PER_POST)
    world.turns()
    assert world.outcomes() == [PullOutcome.DONE]
    assert world.paths[PREFILL] == "nixl/ucx (unknown)"


def test_close_leaves_nothing_behind_and_emits_nothing(world):
    world.start(4)
    world.turns()
    world.agent.reads[0].state = ReadState.DONE
    world.mover.close()
    assert world.agent.closed
    assert world.agent.peers == []
    assert world.agent.reads[0].released
    assert world.events == []
