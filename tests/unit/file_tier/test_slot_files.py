"""What moves the bytes of a file tier: system calls, and NIXL's POSIX plugin with each of its engines. Real files."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.domain.errors import LinkBroken
from baton.engine.build import Engine
from baton.engine.tiers import start
from baton.engine.tiers.start import TierFiles, open_file_tier
from baton.kv.memory import PageMemory
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.settings.base import SettingsError
from baton.settings.tiers import FileTierMover, TierWrite
from baton.transfer.file_tier import posix_agent
from baton.transfer.file_tier.nixl_slot_file import NixlSlotFile
from baton.transfer.file_tier.posix_agent import ENGINES, MAX_BATCH, Engines
from baton.transfer.file_tier.slot_file import SlotFile
from baton.transfer.nixl_agent import nixl_available
from tests.cluster import eventually
from tests.unit.transfer.rigs import needs_nixl

PAGE_BYTES = 5000
NUM_SLOTS = 2 * MAX_BATCH + 10
SLOTS_PER_SEGMENT = 30
SEGMENT_BYTES = SLOTS_PER_SEGMENT * PAGE_BYTES
CONFLICT = {"use_uring": "true", "use_aio": "true"}
"""Options with which the plugin refuses to start."""


def page(slot: int) -> bytearray:
    return bytearray(random.Random(slot).randbytes(PAGE_BYTES))


@pytest.fixture(params=["preadv", *(pytest.param(name, marks=needs_nixl) for name, _ in ENGINES)])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlotFile]:
    """Every slot has its page."""
    sizes = (tmp_path, PAGE_BYTES, NUM_SLOTS, SEGMENT_BYTES)
    if request.param == "preadv":
        made = SlotFile(*sizes)
    else:
        try:
            made = NixlSlotFile(*sizes, [one for one in ENGINES if one[0] == request.param])
        except LinkBroken as error:
            pytest.skip(f"not allowed here: {error}")
    assert request.param in made.mover
    for slot in range(NUM_SLOTS):
        made.write(slot, bytes(page(slot)))
    yield made
    made.close()


def test_slots_are_read_as_written(file: SlotFile):
    slots = random.Random(1).sample(range(NUM_SLOTS), NUM_SLOTS)  # of all segments, in several batches
    assert file.read_all(slots) == [page(slot) for slot in slots]
    assert file.read(7) == page(7)
    file.write(7, bytes(page(8)))
    assert file.read_all([6, 7, 8]) == [page(6), page(8), page(8)]


def test_slots_behind_a_torn_end_are_missed_and_no_others(file: SlotFile, tmp_path: Path):
    """Time and again: what failed must leave nothing behind that fails what comes later."""
    os.truncate(tmp_path / "seg-0001", 3 * PAGE_BYTES + 1)
    whole = {*range(SLOTS_PER_SEGMENT + 3), *range(2 * SLOTS_PER_SEGMENT, NUM_SLOTS)}
    for _ in range(5):
        assert file.read_all(range(NUM_SLOTS)) == [page(slot) if slot in whole else None for slot in range(NUM_SLOTS)]
    with pytest.raises(OSError, match=r".") as caught:
        file.read(SLOTS_PER_SEGMENT + 3)
    assert caught.value.errno == errno.EIO
    file.write(SLOTS_PER_SEGMENT + 3, bytes(page(1)))
    assert file.read(SLOTS_PER_SEGMENT + 3) == page(1)


def test_a_segment_that_is_removed_is_read_or_missed(file: SlotFile, tmp_path: Path):
    (tmp_path / "seg-0000").unlink()
    for slot, found in enumerate(file.read_all(range(NUM_SLOTS))):
        assert found in (None, page(slot)) if slot < SLOTS_PER_SEGMENT else found == page(slot)


@needs_nixl
def test_the_next_engine_is_taken_where_the_first_is_refused(tmp_path: Path):
    file = NixlSlotFile(tmp_path, PAGE_BYTES, NUM_SLOTS, engines=[("io_uring", CONFLICT), ENGINES[1]])
    file.write(0, bytes(page(0)))
    assert (file.mover, file.read(0)) == ("nixl (Linux AIO)", page(0))
    file.close()


@needs_nixl
def test_a_late_disk_is_a_miss_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The transfers end at once here; that they have ended is what comes late."""
    monkeypatch.setattr(posix_agent, "_left_behind", [])
    file = NixlSlotFile(tmp_path, PAGE_BYTES, NUM_SLOTS)
    for slot in range(4):
        file.write(slot, bytes(page(slot)))
    with monkeypatch.context() as late:
        late.setattr(posix_agent, "IO_DEADLINE_S", 0.02)
        for agent in (file._reader._agent, file._writer._agent):
            late.setattr(agent, "transfer", lambda transfer, post=agent.transfer: (post(transfer), "PROC")[1])
            late.setattr(agent, "check_xfer_state", lambda transfer: "PROC")
        assert file.read_all([0, 1]) == [None, None]
        for io in (lambda: file.read(2), lambda: file.write(2, bytes(page(3))), lambda: file.write(3, bytes(page(2)))):
            with pytest.raises(OSError, match=r"within|not ended") as caught:
                io()
            assert caught.value.errno == errno.ETIMEDOUT
        assert not file._reader.close(), "its buffer stays"
    agents = (file._reader, file._writer)
    eventually(lambda: not any(agent.is_late() for agent in agents), 30.0, "the late transfers have ended")
    assert file.read_all([0, 1, 2, 3]) == [page(0), page(1), page(3), page(3)], "the late write has come"
    file.write(3, bytes(page(2)))
    assert file.read(3) == page(2)
    file.close()


def _noted(made: list[object], register: Callable[..., object], rows: list[object], *rest: object) -> object:
    made.extend(rows)
    return register(rows, *rest)


@needs_nixl
def test_files_and_buffers_are_registered_once(tmp_path: Path):
    file = NixlSlotFile(tmp_path, PAGE_BYTES, NUM_SLOTS, SEGMENT_BYTES)
    made: list[Any] = []
    for agent in (file._reader._agent, file._writer._agent):
        agent.register_memory = partial(_noted, made, agent.register_memory)
    for _ in range(3):
        for slot in (0, 1, SLOTS_PER_SEGMENT):
            file.write(slot, bytes(page(slot)))
        file.read_all([0, 1, SLOTS_PER_SEGMENT])
    assert [size for _, size, _, _ in made] == [SEGMENT_BYTES] * 4, "two segments, for reading and for writing"
    file.close()


@pytest.mark.parametrize("engines", [None, [("io_uring", CONFLICT), ("Linux AIO", CONFLICT)]])
def test_a_worker_without_the_plugin_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Engines | None
):
    def missing() -> None:
        raise ImportError("nixl_cu12: no module")

    if engines is None:
        monkeypatch.setattr(posix_agent, "load_nixl", missing)
    elif nixl_available() is not None:
        pytest.skip("NIXL is not installed")
    else:
        monkeypatch.setattr(start, "NixlSlotFile", partial(NixlSlotFile, engines=engines))
    fingerprint, memory = SimpleNamespace(digest="pages"), PageMemory(8, PAGE_BYTES, (PAGE_BYTES,))
    parts = SimpleNamespace(memory=memory, cache=PrefixCache(PagePool(8)), fingerprint=fingerprint)
    files = TierFiles(tmp_path, 16 * PAGE_BYTES, TierWrite.THROUGH, FileTierMover.NIXL)
    reason = "no module" if engines is None else "does not start"
    with pytest.raises(SettingsError, match=f"file_tier_mover=nixl: .*{reason}.*--file-tier-mover preadv"):
        open_file_tier(files, cast(Engine, parts), lambda *_: 0.0, lambda: None)
    with ExitStack() as stack:  # the folder is free again, and system calls need no plugin
        files = TierFiles(tmp_path, 16 * PAGE_BYTES, TierWrite.THROUGH)
        stack.callback(open_file_tier(files, cast(Engine, parts), lambda *_: 0.0, lambda: None)[1])
        assert [path.name for path in (tmp_path / "pages").iterdir()] == ["0"]


PROCESS = """
import sys, threading
from pathlib import Path
from baton.domain.ids import PageKey
from baton.kv.tiers.tier import SlotEntry
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.mover import EndedRead, FileMover
from baton.transfer.file_tier.nixl_slot_file import NixlSlotFile
from baton.transfer.nixl_agent import NixlAgent

links = NixlAgent("links", progress_thread=True)
folder, ended = Path(sys.argv[1]), threading.Semaphore(0)
mover = FileMover(NixlSlotFile(folder, 4096, 64), IndexLog(folder, 4096, 1), (4096,), ended.release)
for slot in range(64):
    mover.write(SlotEntry(slot, PageKey(bytes([slot] * 16)), None, 1), bytes([slot]) * 4096)
assert all(ended.acquire(timeout=30.0) for _ in range(64))
mover.read(1, range(64))
assert ended.acquire(timeout=30.0)
(read,) = [one for one in mover.take_ended() if isinstance(one, EndedRead)]
assert [found[0] for found in read.pages] == [bytes([slot]) * 4096 for slot in range(64)]
mover.close(30.0)
links.close()
print("moved")
"""


@needs_nixl
def test_a_process_with_both_plugins_ends_well(tmp_path: Path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert (ended.returncode, ended.stdout) == (0, "moved\n"), ended.stderr
