"""Moves pages between memory and a file tier in two threads, so that a slow disk never holds up the engine.

Pages travel as copies: an abandoned read or write never touches the pool. The engine thread bounds what is in flight.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.domain.ids import PageKey
from baton.kv.tiers.tier import SlotEntry
from baton.telemetry.logs import get_logger
from baton.transfer.digest import page_digest
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.slot_file import SlotFile

log = get_logger()


@dataclass(frozen=True, slots=True)
class EndedWrite:
    """A page was written and entered in the index, or not: `error`."""

    key: PageKey
    slot: int
    error: OSError | None


@dataclass(frozen=True, slots=True)
class EndedRead:
    """Bytes of the slots of read `number`, with the digests that they have now; None where reading failed."""

    number: int
    pages: tuple[tuple[bytearray, int] | None, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    number: int
    slots: tuple[int, ...]


class FileMover:
    """Two threads over one folder. `on_ended` is called from them; it must not block."""

    tier = "file"

    def __init__(
        self, file: SlotFile, index: IndexLog, part_ends: Sequence[int], on_ended: Callable[[], None] = lambda: None
    ) -> None:
        self._file = file
        self._index = index
        self._part_ends = part_ends
        self._on_ended = on_ended
        self._ended: deque[EndedWrite | EndedRead] = deque()
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[SlotEntry, bytes] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read_all, name="baton-tier-read", daemon=True),
            threading.Thread(target=self._write_all, name="baton-tier-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def read(self, number: int, slots: Sequence[int]) -> None:
        """Starts a read, which ends with an `EndedRead`."""
        self._reads.put(_Read(number, tuple(slots)))

    def write(self, entry: SlotEntry, page: bytes) -> None:
        """Starts to write a page; ends with an `EndedWrite`. In order with `erase`."""
        self._writes.put((entry, page))

    def erase(self, slot: int) -> None:
        """Makes the index forget a slot."""
        self._writes.put((SlotEntry(slot, None), b""))

    def take_ended(self) -> list[EndedWrite | EndedRead]:
        """Takes what has ended."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def first_slot_of_segment(self, slot: int) -> int:
        return self._file.first_slot_of_segment(slot)

    def close(self, timeout_s: float) -> None:
        """Ends the threads after what was started. One that a disk holds up is left behind, with its files."""
        self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            self._file.close()
            self._index.close()

    def _end(self, ended: EndedWrite | EndedRead) -> None:
        self._ended.append(ended)
        self._on_ended()

    def _read_all(self) -> None:
        while (read := self._reads.get()) is not None:
            pages = self._file.read_all(read.slots)
            self._end(EndedRead(read.number, tuple(map(self._digested, pages))))

    def _digested(self, page: bytearray | None) -> tuple[bytearray, int] | None:
        return None if page is None else (page, page_digest(memoryview(page), self._part_ends))

    def _write_all(self) -> None:
        while (write := self._writes.get()) is not None:
            entry, page = write
            if entry.key is None:
                self._erase(entry)
            else:
                self._end(EndedWrite(entry.key, entry.slot, self._write_one(entry, page)))

    def _write_one(self, entry: SlotEntry, page: bytes) -> OSError | None:
        try:
            self._file.write(entry.slot, page)
        except OSError as error:
            return error
        try:
            self._index.append(entry)
        except OSError as error:  # says nothing about the room for slots, even if the disk is full
            return OSError(errno.EIO, f"the index cannot be written: {error}")
        return None

    def _erase(self, entry: SlotEntry) -> None:
        """A page that must not come back: without room for the record the whole index goes."""
        for attempt in (partial(self._index.append, entry), self._index.clear, self._index.remove):
            try:
                attempt()
                return
            except OSError as error:
                log.warning("file_tier_erase_failed", slot=entry.slot, error=str(error))
