"""Slots of a file tier that NIXL's POSIX plugin reads, many at once, and writes."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from baton.transfer.file_tier.posix_agent import ENGINES, MAX_BATCH, Engines, PosixAgent
from baton.transfer.file_tier.slot_file import SEGMENT_BYTES, SlotFile

MAX_BATCH_BYTES = 2 * 1024 * 1024
"""They are copied out while they are in the core's cache: 16 MiB were read half as fast, also from a disk."""


class NixlSlotFile(SlotFile):
    """One thread may read while one thread writes. Pages travel through a buffer of each agent."""

    def __init__(
        self,
        folder: Path,
        page_bytes: int,
        num_slots: int,
        segment_bytes: int = SEGMENT_BYTES,
        engines: Engines = ENGINES,
    ) -> None:
        """Raises `OSError`, `ImportError` without NIXL, `LinkBroken` if its POSIX plugin does not start."""
        super().__init__(folder, page_bytes, num_slots, segment_bytes)
        self._batch = max(1, min(MAX_BATCH, MAX_BATCH_BYTES // page_bytes, num_slots))
        self._reader = PosixAgent("baton-tier-read", self._batch * page_bytes, engines)
        self._writer = PosixAgent("baton-tier-write", page_bytes, engines)

    @property
    def mover(self) -> str:
        return f"nixl ({self._reader.engine})"

    def read(self, slot: int) -> bytearray:
        """Bytes of `slot`. Raises `OSError`, also where the segment is too short or the disk late."""
        return self._read_batch([slot])[0]

    def read_all(self, slots: Sequence[int]) -> list[bytearray | None]:
        """Bytes of slots, None for those that cannot be read."""
        pages: list[bytearray | None] = []
        for first in range(0, len(slots), self._batch):
            batch = slots[first : first + self._batch]
            try:
                pages += self._read_batch(batch)
            except OSError as error:  # of any of them
                is_late = error.errno == errno.ETIMEDOUT
                pages += [None] * len(batch) if is_late else super().read_all(batch)
        return pages

    def write(self, slot: int, page: bytes) -> None:
        """Writes a page into `slot`; makes and preallocates its segment. Raises `OSError`, ENOSPC if that fails."""
        self._writer.write(self._registered(self._writer, slot, grow=True), page)

    def close(self) -> None:
        """Files of a transfer that is still in flight stay open."""
        if all([self._reader.close(), self._writer.close()]):
            super().close()

    def _read_batch(self, slots: Sequence[int]) -> list[bytearray]:
        return self._reader.read([self._registered(self._reader, slot, grow=False) for slot in slots], self.page_bytes)

    def _registered(self, agent: PosixAgent, slot: int, *, grow: bool) -> tuple[int, int]:
        """The place of a slot in a file that an agent knows. Raises `OSError`."""
        segment, offset = self._place(slot)
        fd = self._segment(segment, grow=grow)
        agent.add_file(fd, self.slots_per_segment * self.page_bytes)
        return fd, offset
