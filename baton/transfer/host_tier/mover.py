"""Copies pages between a pool and slots of host memory, at once: that takes less than to wake a thread."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.memory import PoolMemory
from baton.kv.tiers.tier import SlotEntry
from baton.transfer.digest import page_digest
from baton.transfer.file_tier.mover import EndedRead, EndedWrite


class HostMover:
    """Moves pages to and from `memory`, a page a slot. Engine thread only. What is started has ended."""

    tier = "host"

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._ended: list[EndedRead | EndedWrite] = []

    def read(self, number: int, slots: Sequence[int]) -> None:
        """Copies slots out, with the digests that they have now."""
        pages = [bytearray(view) for view in self._memory.read(slots)]
        found = tuple((page, page_digest(memoryview(page), self._memory.part_ends)) for page in pages)
        self._ended.append(EndedRead(number, found))

    def write(self, entry: SlotEntry, page: bytes) -> None:
        """Copies a page into its slot."""
        assert entry.key is not None
        self._memory.write([entry.slot], [memoryview(page)])
        self._ended.append(EndedWrite(entry.key, entry.slot, None))

    def erase(self, slot: int) -> None:
        """Nothing finds a slot without an entry, and nothing here outlives the process."""

    def take_ended(self) -> list[EndedWrite | EndedRead]:
        """Takes what has ended."""
        ended, self._ended = self._ended, []
        return ended

    def first_slot_of_segment(self, slot: int) -> int:
        return slot
