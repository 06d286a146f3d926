"""Host memory slots for the pages of preempted rows. Bookkeeping only; the bytes are `baton.model.storage`'s."""

from __future__ import annotations

from baton.domain.errors import Broken


class HostTier:
    """Hands out page-sized slots, all or none."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_slots: int) -> tuple[int, ...] | None:
        """`num_slots` slots, or None when there are not that many."""
        if num_slots > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(num_slots))

    def free(self, slots: tuple[int, ...]) -> None:
        """Takes slots back. Raises `Broken` for one that was not out."""
        free = set(self._free)
        if any(slot in free or not 0 <= slot < self.num_slots for slot in slots) or len(set(slots)) != len(slots):
            raise Broken(f"host slots {slots} were not taken")
        self._free.extend(slots)
