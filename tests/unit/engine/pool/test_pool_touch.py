"""A pool's memory is there before its use, and what is written meanwhile stays."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from baton.engine.pool import pending, touch
from baton.engine.pool.memory import touch_pool
from baton.engine.pool.touch import TouchThread, touch_beside
from baton.kv.memory import HUGE_PAGE_BYTES, PageMemory
from baton.kv.windows.memory import WindowedMemory

PAGE_BYTES = 64 * 1024
NUM_PAGES = 8 * HUGE_PAGE_BYTES // PAGE_BYTES
DEADLINE_S = 60.0


def resident_bytes(memory: PageMemory) -> int:
    """Bytes of the mapping that the kernel has provided memory for."""
    first, last = memory.address, memory.address + memory.mapped_bytes
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(first // 4096 * 8)
        entries = memoryview(pagemap.read((last - first) // 4096 * 8)).cast("Q")
    return 4096 * sum(entry >> 63 for entry in entries)


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Notes of pools are kept here, away from those of this host's workers."""
    monkeypatch.setattr(pending, "DIRECTORY", tmp_path)
    return tmp_path


def test_a_touched_pool_is_resident_and_keeps_what_was_written():
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)
    assert resident_bytes(memory) == 0
    beside = touch_beside((memory,))
    for page in range(NUM_PAGES):
        memory.page(page)[:8] = page.to_bytes(8, "little")
    if beside is not None:
        beside.thread.join(DEADLINE_S)
    assert resident_bytes(memory) == memory.mapped_bytes
    assert [int.from_bytes(memory.page(page)[:8], "little") for page in range(NUM_PAGES)] == list(range(NUM_PAGES))
    assert not any(bytes(memory.page(page)[8:]).strip(b"\0") for page in range(NUM_PAGES))


def test_an_old_kernel_touches_the_pool_before_its_use(monkeypatch):
    monkeypatch.setattr(PageMemory, "populate", lambda self, start, num_bytes: False)
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)
    assert touch_beside((memory,)) is None
    assert resident_bytes(memory) == memory.mapped_bytes


def test_missing_memory_is_told_by_an_error():
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)
    if not memory.populate(0, HUGE_PAGE_BYTES):
        pytest.skip("this kernel touches no page that is in use")
    with pytest.raises(OSError, match=re.escape(f"no memory for a pool of {memory.mapped_bytes} bytes")):
        memory.populate((1 << 46) - memory.address, HUGE_PAGE_BYTES)  # nothing is mapped there


def test_a_pool_that_may_not_fit_is_touched_before_its_use(monkeypatch: pytest.MonkeyPatch):
    """So that it fails as a start, not as a worker that serves."""
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)
    monkeypatch.setattr(touch, "memory_left", lambda: memory.mapped_bytes - 1)
    assert touch_beside((memory,)) is None
    assert resident_bytes(memory) == memory.mapped_bytes


def test_a_pool_counts_those_of_others_that_are_not_touched(monkeypatch: pytest.MonkeyPatch, notes: Path):
    """Of two workers that start at once both see the memory that only one of them can have."""
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)
    monkeypatch.setattr(touch, "memory_left", lambda: memory.mapped_bytes + 1)
    other = pending.PendingPool(2)
    assert touch_beside((memory,)) is None
    assert resident_bytes(memory) == memory.mapped_bytes
    other.close()
    second = PageMemory(NUM_PAGES, PAGE_BYTES)
    if (beside := touch_beside((second,))) is not None:  # the kernel can
        beside.thread.join(DEADLINE_S)
    assert [path for directory in notes.iterdir() for path in directory.iterdir()] == []


@pytest.mark.parametrize("is_told_first", [True, False])
def test_memory_that_runs_out_later_ends_the_worker(monkeypatch: pytest.MonkeyPatch, is_told_first: bool):
    """Also if it ran out before the worker had its life cycle."""
    logged, errors = list[str](), list[BaseException]()
    monkeypatch.setattr(touch.log, "error", lambda event, **fields: logged.append(f"{event}: {fields['why']}"))
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)

    def fail_later(self: PageMemory, start: int, num_bytes: int) -> bool:
        if start > HUGE_PAGE_BYTES:
            raise OSError("no memory")
        return True

    monkeypatch.setattr(PageMemory, "populate", fail_later)
    beside = TouchThread((memory,))
    if is_told_first:
        beside.on_failure(errors.append)
    beside.thread.start()
    beside.thread.join(DEADLINE_S)
    if not is_told_first:
        beside.on_failure(errors.append)
    assert logged == ["pool_without_memory: no memory"]
    assert [str(error) for error in errors] == ["no memory"]


def test_a_closed_touch_ends_in_its_pause(monkeypatch: pytest.MonkeyPatch):
    touched, first, memory = list[int](), threading.Event(), PageMemory(NUM_PAGES, PAGE_BYTES)

    def record(self: PageMemory, start: int, num_bytes: int) -> bool:
        touched.append(start)
        first.set()
        return True

    monkeypatch.setattr(PageMemory, "populate", record)
    monkeypatch.setattr(time, "monotonic", iter(range(100)).__next__)
    beside = TouchThread((memory,))
    monkeypatch.setattr(touch, "PAUSE_RATIO", 1e6)  # of a page that takes 1 s
    beside.thread.start()
    assert first.wait(DEADLINE_S)
    beside.close()
    beside.thread.join(DEADLINE_S)
    assert not beside.thread.is_alive()
    assert touched == [0]


def test_both_memories_of_a_pool_with_window_slots_are_touched():
    memory = WindowedMemory.allocate(NUM_PAGES, NUM_PAGES, (PAGE_BYTES, 2 * PAGE_BYTES))
    beside = touch_pool(memory)
    if beside is not None:
        beside.thread.join(DEADLINE_S)
    assert resident_bytes(memory.leading) == memory.leading.mapped_bytes
    assert resident_bytes(memory.windows) == memory.windows.mapped_bytes
