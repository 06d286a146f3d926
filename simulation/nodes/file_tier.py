"""The file tier of a simulated prefill worker: a disk that outlives its process, read and written beside the engine.

Real: policy and controller. Simulated: threads and files. Reads and writes take virtual time, in order as the threads'
queues keep them. Some fail, some are late, and a process that dies in a write leaves new bytes under an old entry.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from baton.kv.tiers.tier import SlotEntry
from baton.transfer.digest import page_digest
from baton.transfer.file_tier.mover import EndedRead, EndedWrite
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import Trace

MEAN_IO_S = 0.01
LATE_S = 1.5
"""Longer than the deadline of a read."""
LATE, READ_FAILS, WRITE_FAILS, DISK_FULL = 0.02, 0.03, 0.03, 0.01
"""Shares of reads or writes."""
SLOTS_PER_SEGMENT = 8


@dataclass(slots=True)
class SimFiles:
    """Bytes by slot, and the index: the newest entry of each slot, oldest first."""

    pages: dict[int, bytes] = field(default_factory=dict)
    index: dict[int, SlotEntry] = field(default_factory=dict)

    def rot(self, rng: Random) -> None:
        """Flips one bit in about half of the slots."""
        for slot, page in self.pages.items():
            if rng.random() < 0.5:
                at = rng.randrange(len(page))
                self.pages[slot] = page[:at] + bytes([page[at] ^ 1 << rng.randrange(8)]) + page[at + 1 :]


class SimFileMover:
    """Moves pages to and from a disk, for one life of a process. `on_ended` is called when something has ended."""

    tier = "file"

    def __init__(
        self, process: SimProcess, disk: SimFiles, part_ends: Sequence[int], on_ended: Callable[[], None], trace: Trace
    ) -> None:
        self._process = process
        self._disk = disk
        self._part_ends = part_ends
        self._on_ended = on_ended
        self._trace = trace
        self._ended: list[EndedRead | EndedWrite] = []
        self._reads_until_s = self._writes_until_s = 0.0

    def read(self, number: int, slots: Sequence[int]) -> None:
        """Starts a read, which ends with an `EndedRead`."""
        rng = self._process.rng
        seconds = LATE_S if rng.random() < LATE else rng.expovariate(1 / MEAN_IO_S)
        self._reads_until_s = max(self._reads_until_s, self._now()) + seconds
        self._at(self._reads_until_s, partial(self._read_all, number, slots))

    def write(self, entry: SlotEntry, page: bytes) -> None:
        """Starts to write a page; ends with an `EndedWrite`. In order with `erase`."""
        assert entry.key is not None
        rng, error, slot = self._process.rng, None, entry.slot
        drawn = rng.random()
        if drawn < DISK_FULL:
            error = OSError(errno.ENOSPC, "the disk is full")
        elif drawn < DISK_FULL + WRITE_FAILS:
            error = OSError(errno.EIO, "the disk fails")
        ended = EndedWrite(entry.key, slot, error)
        if error is None:
            self._after_writes(partial(self._put, slot, page))
            self._after_writes(partial(self._enter, entry))
        self._after_writes(lambda: self._end(ended))

    def erase(self, slot: int) -> None:
        """Makes the index forget a slot."""
        self._after_writes(partial(self._forget, slot))

    def take_ended(self) -> list[EndedWrite | EndedRead]:
        """Takes what has ended."""
        ended, self._ended = self._ended, []
        return ended

    def first_slot_of_segment(self, slot: int) -> int:
        return slot - slot % SLOTS_PER_SEGMENT

    def _put(self, slot: int, page: bytes) -> None:
        self._disk.pages[slot] = page

    def _forget(self, slot: int) -> None:
        self._disk.index.pop(slot, None)

    def _enter(self, entry: SlotEntry) -> None:
        self._disk.index.pop(entry.slot, None)
        self._disk.index[entry.slot] = entry

    def _read_all(self, number: int, slots: Sequence[int]) -> None:
        pages = tuple(map(self._read_one, slots))
        self._trace.note(self._process.name, f"reads {len(pages)} pages from files")
        self._end(EndedRead(number, pages))

    def _read_one(self, slot: int) -> tuple[bytearray, int] | None:
        page = self._disk.pages.get(slot)
        if page is None or self._process.rng.random() < READ_FAILS:
            return None
        found = bytearray(page)
        return found, page_digest(memoryview(found), self._part_ends)

    def _end(self, ended: EndedRead | EndedWrite) -> None:
        self._ended.append(ended)
        self._on_ended()

    def _after_writes(self, work: Callable[[], None]) -> None:
        self._writes_until_s = max(self._writes_until_s, self._now()) + self._process.rng.expovariate(1 / MEAN_IO_S)
        self._at(self._writes_until_s, work)

    def _at(self, at_s: float, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_at(at_s, self._do, work)

    def _do(self, work: Callable[[], None]) -> None:
        """Performs work of the disk's threads; a dead process has none, and a frozen one goes on later."""
        if not self._process.alive:
            return
        if self._now() < self._process.frozen_until_s:
            self._at(self._process.frozen_until_s, work)
        else:
            self._process.enter(work)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
