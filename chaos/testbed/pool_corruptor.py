"""Changes bytes in the page pool of a running worker, as failing memory would. Linux only: writes to /proc/PID/mem.

A worker logs the place of its pool when it serves. Only the pool is changed, and only pages with content, so a page
that was never filled stays as it is. Called by `faults`; needs the right to trace the worker, as its parent has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NUM_BYTES = 64
"""Bytes that change in a page: one cache line."""
_EXTENT = re.compile(r"pool['\"]?[=:]\s*['\"]?(0x[0-9a-f]+):(\d+):(\d+)")


class PoolLocationError(Exception):
    """The worker's log does not tell where its pool is."""


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """Place of a pool in a process."""

    address: int
    num_pages: int
    page_bytes: int


def find_pool(log: Path) -> PoolRegion:
    """The pool of the process that wrote `log`. Raises `PoolLocationError`."""
    found = _EXTENT.search(log.read_text(errors="replace"))
    if found is None:
        raise PoolLocationError(f"{log} names no pool")
    return PoolRegion(int(found[1], 16), int(found[2]), int(found[3]))


def corrupt_pages(pid: int, extent: PoolRegion) -> int:
    """Inverts `NUM_BYTES` in the middle of every page with content; returns the number of pages changed."""
    num_changed = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for page in range(extent.num_pages):
            at = extent.address + page * extent.page_bytes + extent.page_bytes // 2
            memory.seek(at)
            before = memory.read(NUM_BYTES)
            if any(before):
                memory.seek(at)
                memory.write(bytes(byte ^ 0xFF for byte in before))
                num_changed += 1
    return num_changed
