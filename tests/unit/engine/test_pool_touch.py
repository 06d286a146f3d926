"""A pool's memory is there before its use, and what is written meanwhile stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.engine.pool import touch
from baton.engine.pool.touch import touch_beside
from baton.kv.memory import HUGE_PAGE_BYTES, PageMemory

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


def test_a_touched_pool_is_resident_and_keeps_what_was_written():
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)
    assert resident_bytes(memory) == 0
    thread = touch_beside((memory,))
    for page in range(NUM_PAGES):
        memory.page(page)[:8] = page.to_bytes(8, "little")
    if thread is not None:
        thread.join(DEADLINE_S)
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


def test_memory_that_runs_out_later_is_logged_and_the_pool_serves(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(touch.log, "warning", lambda event, **fields: told.append(f"{event}: {fields['why']}"))
    populate, memory = PageMemory.populate, PageMemory(NUM_PAGES, PAGE_BYTES)

    def fail_later(self, start: int, num_bytes: int) -> bool:
        if start > HUGE_PAGE_BYTES:
            raise OSError("no memory")
        return populate(self, start, num_bytes)

    monkeypatch.setattr(PageMemory, "populate", fail_later)
    thread = touch_beside((memory,))
    if thread is None:
        pytest.skip("this kernel touches no page that is in use")
    thread.join(DEADLINE_S)
    assert told == ["pool_not_touched: no memory"]
    memory.page(NUM_PAGES - 1)[:] = b"x" * PAGE_BYTES
