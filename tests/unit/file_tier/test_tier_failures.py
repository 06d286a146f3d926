"""A file tier in real folders: warm after a restart, and every fault of its files costs misses only.

Each test runs with both movers: system calls, and NIXL's POSIX plugin.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.domain.ids import PageKey
from baton.engine.tiers.controller import MAX_WAIT_S, READ_DEADLINE_S
from baton.kv.page_digests import PageState
from baton.kv.tiers.tier import SlotEntry
from baton.settings.tiers import TierWrite
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.slot_file import FolderClaim, SlotFile
from tests.cluster import eventually
from tests.tiny_workers import PAGE_BYTES, PAGE_SIZE
from tests.unit.file_tier.tier_world import KINDS, WAIT_S, TierWorld, num_full_pages
from tests.unit.transfer.rigs import needs_nixl

PROMPT = [0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1]  # 5 full pages
NUM_COPIES = 5
OTHER = [1, 1, 1, 0, 0, 0, 1]


@pytest.fixture(autouse=True, params=["preadv", pytest.param("nixl", marks=needs_nixl)])
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves the bytes of each world of a test."""
    monkeypatch.setattr(TierWorld, "kind", KINDS[request.param])


def warm(root: Path) -> Path:
    """Leaves the copies of PROMPT; returns their folder. `close` writes nothing, so a kill leaves the same."""
    world = TierWorld(root)
    world.ask("a", PROMPT)
    world.wait_written(NUM_COPIES)
    world.close()
    return world.folder.path


def tokens_from_file(world: TierWorld, name: str = "b") -> int:
    seal = world.ask(name, PROMPT)
    num_tokens = seal.num_from_tiers.get("file", 0)
    assert num_tokens <= seal.times.cached_tokens
    return num_tokens


def test_a_restarted_worker_is_warm(tmp_path: Path) -> None:
    warm(tmp_path)
    world = TierWorld(tmp_path)
    assert tokens_from_file(world) == NUM_COPIES * PAGE_SIZE == num_full_pages(PROMPT) * PAGE_SIZE
    assert tokens_from_file(world, "c") == 0, "now they are the device's"
    world.close()


def test_pages_that_were_evicted_come_back(tmp_path: Path) -> None:
    world = TierWorld(tmp_path)
    world.ask("a", PROMPT)
    world.wait_written(NUM_COPIES)
    world.cache.clear()
    assert tokens_from_file(world) == NUM_COPIES * PAGE_SIZE
    world.close()


def test_selective_copies_what_a_second_request_uses(tmp_path: Path) -> None:
    world = TierWorld(tmp_path, TierWrite.SELECTIVE)
    world.ask("a", PROMPT)
    world.ask("o", OTHER)
    assert len(world.tier) == 0
    world.ask("b", PROMPT)
    world.wait_written(NUM_COPIES)
    assert len(world.tier) == NUM_COPIES
    world.close()


def test_none_reads_and_writes_nothing(tmp_path: Path) -> None:
    warm(tmp_path)
    world = TierWorld(tmp_path, TierWrite.NONE)
    assert tokens_from_file(world) == NUM_COPIES * PAGE_SIZE
    world.ask("o", OTHER)
    world.ask("p", OTHER)
    world.turn()
    assert len(world.tier) == NUM_COPIES
    world.close()


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("page", range(NUM_COPIES))
def test_a_flipped_bit_ends_the_match_there(tmp_path: Path, page: int) -> None:
    folder = warm(tmp_path)
    flip(folder / "seg-0000", page * PAGE_BYTES + 3)
    world = TierWorld(tmp_path)
    assert tokens_from_file(world) == page * PAGE_SIZE
    world.wait_written(NUM_COPIES)  # computed and copied again
    world.cache.clear()
    assert tokens_from_file(world, "c") == NUM_COPIES * PAGE_SIZE
    world.close()


def test_a_torn_segment_is_a_miss(tmp_path: Path) -> None:
    folder = warm(tmp_path)
    os.truncate(folder / "seg-0000", 2 * PAGE_BYTES + 1)
    world = TierWorld(tmp_path)
    assert tokens_from_file(world) == 0
    world.close()


def test_a_lost_segment_is_a_miss(tmp_path: Path) -> None:
    (warm(tmp_path) / "seg-0000").unlink()
    world = TierWorld(tmp_path)
    assert tokens_from_file(world) == 0
    world.close()


@pytest.mark.parametrize("num_bytes", [0, 5, 24, 30, 24 + 48, 24 + 2 * 48 + 47])
def test_a_truncated_index_keeps_its_whole_records(tmp_path: Path, num_bytes: int) -> None:
    index = warm(tmp_path) / "index.log"
    assert index.stat().st_size == 24 + NUM_COPIES * 48
    os.truncate(index, num_bytes)
    world = TierWorld(tmp_path)
    assert tokens_from_file(world) == max(0, (num_bytes - 24) // 48) * PAGE_SIZE
    world.close()


def test_a_bad_record_ends_the_index(tmp_path: Path) -> None:
    index = warm(tmp_path) / "index.log"
    flip(index, 24 + 3 * 48 + 40)
    world = TierWorld(tmp_path)
    assert tokens_from_file(world) == 3 * PAGE_SIZE
    world.close()


def test_a_record_with_a_false_digest_is_a_miss(tmp_path: Path) -> None:
    """The checksum of the record is right: the digest of the page decides."""
    folder = warm(tmp_path)
    index = IndexLog(folder, PAGE_BYTES, 1)
    first, second = index.entries[:2]
    index.append(SlotEntry(second.slot, first.key, first.parent, first.digest))  # the second page's bytes
    index.close()
    world = TierWorld(tmp_path)
    assert tokens_from_file(world) == 0
    world.close()


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_for_a_segment_the_tier_is_smaller(tmp_path: Path) -> None:
    world = TierWorld(tmp_path, num_slots=2**21 // PAGE_BYTES, segment_bytes=2**21)
    with file_size_limit(2**20):
        world.ask("a", PROMPT)
        world.ask("b", OTHER)

        def gave_up() -> bool:
            world.turn()
            return world.tier.num_slots == 0

        eventually(gave_up, WAIT_S, "the tier stops to grow")
        world.cache.clear()
        assert tokens_from_file(world, "d") == 0
    world.close()


class _StalledFile(SlotFile):
    """Reads wait until the test lets them go."""

    released = threading.Event()

    def read_all(self, slots: Sequence[int]) -> list[bytearray | None]:
        assert self.released.wait(60.0)
        return super().read_all(slots)


def over(file: type[SlotFile]) -> type[SlotFile]:
    """`file` on top of what moves the bytes of this test."""
    return type(file.__name__, (file, TierWorld.kind), {}) if TierWorld.kind is not SlotFile else file


def test_a_stalled_disk_delays_a_prompt_for_a_moment(tmp_path: Path) -> None:
    warm(tmp_path)
    _StalledFile.released.clear()
    world = TierWorld(tmp_path, file=over(_StalledFile))
    world.begin("b", PROMPT)
    world.turn()
    assert world.scheduler.num_waiting == 1, "it waits for the file"
    assert world.scheduler.next_wakeup() == READ_DEADLINE_S
    world.now = READ_DEADLINE_S
    world.turn()
    assert world.scheduler.num_waiting == 0, "it is computed"
    seal = world.finish("b")
    assert not seal.num_from_tiers
    world.cache.clear()
    assert tokens_from_file(world, "c") == 0, "the circuit breaker is open"
    world.cache.clear()
    world.now += 100.0
    assert tokens_from_file(world, "d") == 0, "the read is still stuck: nobody waits for it"
    world.cache.clear()
    _StalledFile.released.set()
    world.wait_read()
    world.cache.clear()
    assert tokens_from_file(world, "e") == NUM_COPIES * PAGE_SIZE
    assert MAX_WAIT_S > READ_DEADLINE_S
    world.close()


class _BrokenFile(SlotFile):
    """Its segments are open for writing only, so that each read fails."""

    def _segment(self, segment: int, *, grow: bool) -> int:
        if segment not in self._segments:
            self._segments[segment] = os.open(self._folder / f"seg-{segment:04d}", os.O_WRONLY)
        return self._segments[segment]


def test_a_disk_that_fails_is_left_alone(tmp_path: Path) -> None:
    warm(tmp_path)
    world = TierWorld(tmp_path, file=over(_BrokenFile))
    for name in "bcde":
        assert tokens_from_file(world, name) == 0
        world.cache.clear()
    world.close()


def test_a_quarantined_page_leaves_no_copies(tmp_path: Path) -> None:
    """Nor do pages that were computed from it, also after a restart."""
    world = TierWorld(tmp_path)
    world.ask("a", PROMPT)
    world.wait_written(NUM_COPIES)
    second = world.key_in(1)
    page = world.cache.page_of(second)
    assert world.cache.pool.digests.state(page) is PageState.SETTLED
    world.memory.page(page)[0] ^= 1
    world.scheduler.on_wrong_pages([page], world.now)
    world.turn()
    assert len(world.tier) == 1
    world.close()
    again = TierWorld(tmp_path)
    assert len(again.tier) == 1
    assert tokens_from_file(again) == PAGE_SIZE
    again.close()


def test_a_peer_s_quarantined_page_leaves_no_copies(tmp_path: Path) -> None:
    """The page had been imported, copied and evicted: nothing in memory tells any more that it was the peer's."""
    world = TierWorld(tmp_path)
    world.ask("a", PROMPT)
    world.wait_written(NUM_COPIES)
    second = world.key_in(1)
    world.cache.clear()
    world.scheduler.on_keys_quarantined([second])
    assert tokens_from_file(world, "b") == PAGE_SIZE
    assert world.scheduler.quarantine.since(0) == ((), 0), "the pages computed since are intact"
    world.wait_written(NUM_COPIES)
    world.scheduler.on_keys_quarantined([PageKey(b"another prompt's")])
    world.cache.clear()
    assert tokens_from_file(world, "c") == NUM_COPIES * PAGE_SIZE, "dropped once, and not for other keys"
    world.close()


def test_a_late_read_of_a_quarantined_page_enters_nothing(tmp_path: Path) -> None:
    warm(tmp_path)
    _StalledFile.released.clear()
    world = TierWorld(tmp_path, file=over(_StalledFile))
    world.begin("b", PROMPT)
    world.turn()
    world.scheduler.quarantine._keys.append(world.key_in(0))
    world.scheduler.quarantine.number += 1
    world.turn()
    assert len(world.tier) == 0
    _StalledFile.released.set()
    assert not world.finish("b").num_from_tiers
    world.close()


def test_two_workers_have_two_folders(tmp_path: Path) -> None:
    first, second = FolderClaim(tmp_path, "f"), FolderClaim(tmp_path, "f")
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.close()
    third = FolderClaim(tmp_path, "f")
    assert third.path == first.path
    second.close()
    third.close()


def test_the_index_is_rewritten_when_most_of_it_is_old(tmp_path: Path) -> None:
    index = IndexLog(tmp_path, PAGE_BYTES, 2)
    entry = SlotEntry(3, PageKey(b"k" * 16), None, (7 << 64) + 5)
    for _ in range(2000):
        index.append(entry)
    assert (tmp_path / "index.log").stat().st_size < 1100 * 56
    index.close()
    assert IndexLog(tmp_path, PAGE_BYTES, 2).entries == [entry]
    assert IndexLog(tmp_path, PAGE_BYTES, 1).entries == [], "the parts of a page are others"
