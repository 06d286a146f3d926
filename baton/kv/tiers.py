"""Host memory slots for the pages of preempted rows. Bookkeeping only; `baton.model.storage` has the bytes."""

from __future__ import annotations

from baton.domain.errors import Broken


class HostTier:
    """Allocates page-sized slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_slots: int) -> tuple[int, ...] | None:
        """Takes `num_slots` slots; None if there are too few."""
        if num_slots > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(num_slots))

    def free(self, slots: tuple[int, ...]) -> None:
        """Returns slots. Raises `Broken` for a slot that is not allocated."""
        free = set(self._free)
        if any(slot in free or not 0 <= slot < self.num_slots for slot in slots) or len(set(slots)) != len(slots):
            raise Broken(f"host slots {slots} are not allocated")
        self._free.extend(slots)
