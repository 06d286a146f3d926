"""Slots for the window parts of one pool's pages: fewer than pages, and allocated apart. Pure; engine thread only.

Each page has memory for the layers that keep every position. Its window part (`baton.kv.geometry`) lies in a slot of a
second pool, for as long as something may read it or while there is room. A page without a slot is windowless.

A slot's life: *free -> held -> unheld -> free*. Users hold the window parts that their windows reach (`PageTable`, the
pins of exports). The slot of a page that is not cached is free with its last hold. That of a cached page stays, so that
a prompt can go on from there, until another page needs it:

* Window parts that a sequence has moved past go first. The only prompts that want them are those that branch off there.
* Then goes the one whose last use is the longest ago. A window part that a match has used is never passed for good: it
  is a branch, and keeps its place in that order.

A step in flight may read slots that are given up meanwhile. `fence` keeps those from everyone else until it has ended.

Users reserve the most slots that they will hold at once before they take the first one. As long as no more are reserved
than there are, every reserved slot can be had: what else has a slot then is unheld.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.page_digests import FAULT_WINDOW_S, PageDigests

NO_SLOT = -1


class WindowSlots:
    """`num_slots` slots. `is_cached`: tells if the prefix cache has a page; `digests`: of the pool's pages."""

    def __init__(
        self, num_slots: int, num_pages: int, is_cached: Callable[[PageId], bool], digests: PageDigests
    ) -> None:
        self.num_slots = num_slots
        self.slot_of = array("i", [NO_SLOT]) * num_pages
        """By page. Runners and transfers read it."""
        self.least_slots = 0
        """Never fewer are left when slots are retired: a sequence could not be computed."""
        self.num_evicted = 0
        self._is_cached = is_cached
        self._digests = digests
        self._free = list(reversed(range(num_slots)))
        self._page_of: list[PageId | None] = [None] * num_slots
        self._fences: Counter[int] = Counter()  # by slot
        self._waiting: set[int] = set()  # given up, and fenced
        self._holds = array("I", bytes(4 * num_pages))
        self._unheld: OrderedDict[PageId, None] = OrderedDict()  # pages in the order of eviction
        self._is_branch = bytearray(num_pages)  # a match has used the window part
        self._num_reserved = 0
        self._faulted_at: dict[int, float] = {}
        self._worn: set[int] = set()  # slots that are retired as soon as they can be spared
        self._num_retired = 0

    @property
    def free_slots(self) -> Sequence[int]:
        """Slots that no page has."""
        return self._free

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_unheld(self) -> int:
        """Slots of cached pages that nothing holds; each can be evicted."""
        return len(self._unheld)

    @property
    def num_retired(self) -> int:
        """Slots whose memory was faulty twice; they are never used again."""
        return self._num_retired

    @property
    def num_held(self) -> int:
        """Slots that something holds, or that a step in flight may still read."""
        return self.num_usable - len(self._free) - len(self._unheld)

    @property
    def num_usable(self) -> int:
        """Slots that are not retired."""
        return self.num_slots - self._num_retired

    @property
    def num_unreserved(self) -> int:
        """Slots that may still be reserved."""
        return self.num_usable - self._num_reserved

    def counts(self) -> dict[str, int]:
        """Number of slots by state; the values add up to `num_slots`."""
        retired = self._num_retired
        return {"free": self.num_free, "held": self.num_held, "unheld": self.num_unheld, "retired": retired}

    def slots(self, pages: Iterable[PageId]) -> tuple[int, ...]:
        """Slot of each page, or `NO_SLOT`."""
        return tuple([self.slot_of[page] for page in pages])

    def slots_of(self, pages: Sequence[PageId], held: Container[PageId]) -> tuple[int, ...]:
        """Slot of each page in `held`, `NO_SLOT` of the others: these may go to another page at any time."""
        return tuple([self.slot_of[page] if page in held else NO_SLOT for page in pages])

    def reserve(self, num_slots: int, *, forced: bool = False) -> bool:
        """Reserves slots for a user, or gives them back, if negative. False, without a change, for too many.

        `forced`: slots that another user holds now, and which it passes on. Those are counted twice for a while.
        """
        if num_slots > max(0, self.num_unreserved) and not forced:
            return False
        self._num_reserved += num_slots
        if self._num_reserved < 0:
            raise Broken("more window slots were given back than reserved")
        return True

    def take(self, pages: Sequence[PageId]) -> bool:
        """Gives each of `pages` a slot, unless it has one, and holds it once. False, without a change, for too few.

        Raises `Broken` for a page whose bytes are final and that has no window part.
        """
        new = [page for page in pages if self.slot_of[page] == NO_SLOT]
        for page in new:
            if self._digests.is_settled(page) or self._is_cached(page):
                raise Broken(f"page {page} is final without its window part")
        num_kept = sum(self.slot_of[page] != NO_SLOT and not self._holds[page] for page in pages)
        fenced = [self._page_of[slot] for slot in self._fences]
        num_kept += sum(page in self._unheld and page not in pages for page in fenced)
        if len(new) > len(self._free) + len(self._unheld) - num_kept:
            return False
        for page in pages:
            self._unheld.pop(page, None)
            self._holds[page] += 1
        for page in new:
            if not self._free:
                self._evict()
            slot = self.slot_of[page] = self._free.pop()
            self._page_of[slot] = page
            self._digests.gain_window(page)
        return True

    def hold(self, pages: Iterable[PageId], *, matched: bool = False) -> None:
        """Holds window parts that are there. `matched`: for a sequence that goes on from cached pages."""
        for page in pages:
            if self.slot_of[page] == NO_SLOT:
                raise Broken(f"page {page} has no window part to hold")
            self._unheld.pop(page, None)
            self._holds[page] += 1
            if matched:
                self._is_branch[page] = True

    def drop(self, pages: Iterable[PageId], *, passed: bool = False) -> None:
        """Drops one hold of each window part. `passed`: the user's window has moved past them."""
        for page in pages:
            if not self._holds[page]:
                raise Broken(f"the window part of page {page} is not held")
            self._holds[page] -= 1
            if self._holds[page]:
                continue
            if not self._is_cached(page) or self.slot_of[page] in self._worn:
                self._lose(page)
                continue
            self._unheld[page] = None
            if passed and not self._is_branch[page]:
                self._unheld.move_to_end(page, last=False)

    def replace(self, page: PageId, other: PageId) -> None:
        """Moves what `page` has to `other`, which takes its place for its users: holds, and the slot if that has none.

        Both pages are settled and belong to the same tokens. All holds of `page` are its user's own.
        """
        if self.slot_of[other] == NO_SLOT:
            if self.slot_of[page] == NO_SLOT:
                return
            slot = self.slot_of[other] = self.slot_of[page]
            self.slot_of[page], self._page_of[slot] = NO_SLOT, other
            self._digests.move_window(page, other)
            if not self._holds[page]:
                self._unheld.pop(page, None)
                self._unheld[other] = None
        elif self._holds[page]:
            self._unheld.pop(other, None)
        self._holds[other] += self._holds[page]
        self._holds[page] = 0
        if self.slot_of[page] != NO_SLOT:
            self._lose(page)

    def fence(self, pages: Iterable[PageId]) -> list[int]:
        """Keeps the slots of `pages`, whoever has them, from everyone else until `unfence`; returns them.

        They count as reserved: their users may give back their own reservations meanwhile.
        """
        slots = [self.slot_of[page] for page in pages if self.slot_of[page] != NO_SLOT]
        self._fences.update(slots)
        self.reserve(len(slots), forced=True)
        return slots

    def unfence(self, slots: Sequence[int]) -> None:
        """Ends a fence."""
        for slot in slots:
            self._fences[slot] -= 1
            if self._fences[slot]:
                continue
            del self._fences[slot]
            if slot in self._waiting:
                self._waiting.remove(slot)
                self._release(slot)
        self.reserve(-len(slots))

    def record_fault(self, page: PageId, now: float) -> None:
        """Records wrong bytes in a page, perhaps in its slot; twice within `FAULT_WINDOW_S` retires that."""
        slot = self.slot_of[page]
        if slot == NO_SLOT:
            return
        before = self._faulted_at.get(slot)
        if before is not None and now - before <= FAULT_WINDOW_S:
            self._worn.add(slot)
        self._faulted_at[slot] = now

    def on_freed(self, page: PageId) -> None:
        """Frees the slot of a page that is free now. Only the pool calls this."""
        if self._holds[page]:
            raise Broken(f"page {page} is freed and its window part is held")
        if self.slot_of[page] != NO_SLOT:
            self._lose(page)

    def check(self) -> None:
        """Recounts everything. Raises `Broken` at the first difference."""
        self.check_pages(0, len(self.slot_of))
        used = [slot for slot in self.slot_of if slot != NO_SLOT]
        all_slots = [*used, *self._free, *self._waiting]
        if len(set(all_slots)) != len(all_slots) or len(all_slots) != self.num_usable:
            raise Broken(f"{len(used)} window slots are used and {len(self._free)} free, of {self.num_usable}")

    def check_pages(self, start: int, stop: int) -> None:
        """The part of `check` that concerns single pages, for pages [start, stop)."""
        for page, slot in enumerate(self.slot_of[start:stop], start):
            if self._digests.is_windowless(PageId(page)) != (slot == NO_SLOT):
                raise Broken(f"page {page} has slot {slot}, its digest says otherwise")
            if slot != NO_SLOT and self._page_of[slot] != page:
                raise Broken(f"slot {slot} of page {page} is that of page {self._page_of[slot]}")
            if self._holds[page] and slot == NO_SLOT:
                raise Broken(f"the window part of page {page} is held and has no slot")
            if (page in self._unheld) != (slot != NO_SLOT and not self._holds[page]):
                raise Broken(f"slot {slot} of page {page} is in no order of eviction, or wrongly")

    def _evict(self) -> None:
        page = next(one for one in self._unheld if self.slot_of[one] not in self._fences)
        self._lose(page)
        self.num_evicted += 1

    def _lose(self, page: PageId) -> None:
        slot, self.slot_of[page] = self.slot_of[page], NO_SLOT
        self._page_of[slot] = None
        self._unheld.pop(page, None)
        self._is_branch[page] = False
        self._digests.lose_window(page)
        if slot in self._fences:
            self._waiting.add(slot)
        else:
            self._release(slot)

    def _release(self, slot: int) -> None:
        if slot in self._worn and self.num_unreserved > 0 and self.num_usable > self.least_slots:
            self._worn.discard(slot)
            self._num_retired += 1
            return
        self._free.append(slot)
