"""Host memory slots for the pages of preempted rows. Bookkeeping only; `baton.model.storage` has the bytes.

A page's digest moves with its bytes: `keep` takes it at the copy-out, and `is_intact` compares before the copy-in.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.page_digests import PageDigests, PageHasher, is_same


class SwapSpace:
    """Allocates page-sized slots."""

    def __init__(self, num_slots: int, hasher: PageHasher | None = None, num_parts: int = 1) -> None:
        """`hasher`: of the slots' bytes; None: digests are off. `num_parts`: of a page."""
        self._num_parts = num_parts
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._digests = PageDigests(num_slots)
        self._hasher = hasher

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_slots: int) -> tuple[int, ...] | None:
        """Takes `num_slots` slots; None if there are too few."""
        if num_slots > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(num_slots))

    def keep(self, slots: Sequence[int], digests: Sequence[int], windowless: Sequence[int] = ()) -> None:
        """Sets the digests of the pages that are copied into `slots`. `digests` may be empty: digests are off.

        `windowless`: positions of those of the pages that have no window part.
        """
        self._digests.mark_windowless(PageId(slots[at]) for at in windowless)
        for slot, digest in zip(slots, digests, strict=bool(digests)):
            self._digests.set(PageId(slot), digest)

    def digests(self, slots: Sequence[int]) -> list[int]:
        """Digests of `slots`, in order; none if digests are off."""
        pages = [PageId(slot) for slot in slots]
        return [self._digests.digest(page) for page in pages if self._digests.is_settled(page)]

    def kept(self, slots: Sequence[int], num_full: int) -> tuple[list[int], list[int]]:
        """What moves with pages from `slots`: digests of the first `num_full`, and positions of windowless ones."""
        windowless = [at for at, slot in enumerate(slots) if self._digests.is_windowless(PageId(slot))]
        return self.digests(slots)[:num_full], windowless

    def is_intact(self, slots: Sequence[int]) -> bool:
        """True if the bytes in `slots` are those that were copied out, or digests are off."""
        wanted = self.digests(slots)
        if self._hasher is None or not wanted:
            return True
        found = self._hasher.digests([PageId(slot) for slot in slots])
        return all(is_same(*pair, self._num_parts) for pair in zip(found, wanted, strict=True))

    def free(self, slots: tuple[int, ...]) -> None:
        """Returns slots. Raises `Broken` for a slot that is not allocated."""
        free = set(self._free)
        if any(slot in free or not 0 <= slot < self.num_slots for slot in slots) or len(set(slots)) != len(slots):
            raise Broken(f"host slots {slots} are not allocated")
        for slot in slots:
            self._digests.on_freed(PageId(slot))
        self._free.extend(slots)
