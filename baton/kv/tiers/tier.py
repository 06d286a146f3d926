"""Copies of cached pages in slots, of files or of host memory. Bookkeeping only; `baton.transfer` has the bytes.

A copy's life: *absent -> writing -> present <-> reading -> absent*. Rules:

* Copies are closed towards the root: a copy's parent has a copy, too. So `drop` of a wrong page reaches all copies of
  what was computed from it, and only copies without children are evicted.
* A copy is matched only after its write has ended; its digest is the one that the page settled with (`begin_write`).
* What is read back counts only if its digest is that one (`end_read`), else the copy goes with its descendants.
* Each slot is free or has one copy: `free + writing + present + reading == num_slots`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.domain.errors import Broken
from baton.domain.ids import PageKey
from baton.kv.eviction import EvictionPolicy, EvictionQueue, PageUse
from baton.kv.page_digests import is_same, is_windowless


class CopyState(enum.Enum):
    """State of a copy. One that is dropped under I/O keeps its slot until the I/O has ended."""

    WRITING = "writing"
    PRESENT = "present"
    READING = "reading"


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """What is known of a slot: the page's key, its parent's (None: the root) and its digest. `key` None: empty."""

    slot: int
    key: PageKey | None
    parent: PageKey | None = None
    digest: int = 0


@dataclass(slots=True)
class _Copy:
    slot: int
    parent: PageKey | None
    digest: int
    state: CopyState
    num_children: int = 0
    use: PageUse = field(default_factory=PageUse)


class CacheTier:
    """Copies of pages in `num_slots` slots."""

    def __init__(self, num_slots: int, policy: EvictionPolicy = EvictionPolicy.LRU, num_parts: int = 1) -> None:
        """`num_parts`: of a page."""
        self.num_slots = num_slots
        self._num_parts = num_parts
        self._limit = num_slots
        self._free = list(reversed(range(num_slots)))
        self._copies: dict[PageKey, _Copy] = {}
        self._dropped: set[int] = set()  # slots of dropped copies under I/O
        self._leaves = EvictionQueue(policy)
        self._num_uses = 0

    def __contains__(self, key: PageKey) -> bool:
        return key in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_present(self) -> int:
        """Copies whose write has ended."""
        return sum(copy.state is not CopyState.WRITING for copy in self._copies.values())

    def state(self, key: PageKey) -> CopyState | None:
        """State of a page's copy; None if it has none."""
        copy = self._copies.get(key)
        return None if copy is None else copy.state

    def slot(self, key: PageKey) -> int | None:
        """Slot of a page's copy; None if it has none."""
        copy = self._copies.get(key)
        return None if copy is None else copy.slot

    def is_windowless(self, key: PageKey) -> bool:
        """True if the page was copied while its window part had no slot. Raises `KeyError` without a copy."""
        return is_windowless(self._copies[key].digest, self._num_parts)

    def entries(self) -> list[SlotEntry]:
        """All copies, as the index has them once they are written."""
        return [SlotEntry(copy.slot, key, copy.parent, copy.digest) for key, copy in self._copies.items()]

    def restore(self, entries: Iterable[SlotEntry]) -> None:
        """Enters the copies of an earlier process, oldest first. Ignores those without their parents or a slot."""
        newest = {entry.key: entry for entry in entries if entry.key is not None and 0 <= entry.slot < self._limit}
        children: dict[PageKey | None, list[SlotEntry]] = {}
        for entry in newest.values():
            children.setdefault(entry.parent, []).append(entry)
        ready = list(children.get(None, ()))
        free = set(self._free)
        for entry in ready:  # grows while it is read
            assert entry.key is not None
            if entry.key in self._copies or entry.slot not in free:
                continue
            free.discard(entry.slot)
            self._add(entry.key, _Copy(entry.slot, entry.parent, entry.digest, CopyState.PRESENT))
            ready += children.get(entry.key, ())
        self._free = [slot for slot in self._free if slot in free]
        self.touch([key for key in newest if key in self._copies][::-1])  # the newest record is the youngest
        for key in self._copies:
            self._rank(key)

    def num_matching(self, keys: Sequence[PageKey]) -> int:
        """Number of leading `keys` with copies that can be read, or are being read."""
        for i, key in enumerate(keys):
            copy = self._copies.get(key)
            if copy is None or copy.state is CopyState.WRITING:
                return i
        return len(keys)

    def begin_write(self, key: PageKey, parent: PageKey | None, digest: int) -> int | None:
        """Starts a copy of a settled page; returns its slot. None if there is one, no parent, or no slot to take."""
        if key in self._copies or (parent is not None and parent not in self._copies):
            return None
        if not self._free and (self._limit == 0 or not self._evict_for(parent)):
            return None
        slot = self._free.pop()
        self._add(key, _Copy(slot, parent, digest, CopyState.WRITING))
        return slot

    def end_write(self, key: PageKey, slot: int, *, ok: bool) -> None:
        """Ends a write: the copy is present, or goes with its descendants."""
        if self._ends_dropped(slot):
            return
        copy = self._copy_under(key, slot, CopyState.WRITING)
        copy.state = CopyState.PRESENT
        if ok:
            self.touch([key])
            self._rank(key)
        else:
            self.drop(key)

    def begin_read(self, keys: Sequence[PageKey]) -> list[int]:
        """Starts to read the copies of `keys`; returns their slots. Raises `Broken` unless all are present."""
        for key in keys:
            if self.state(key) is not CopyState.PRESENT:
                raise Broken(f"a copy to read is {self.state(key)}")
        for key in keys:
            self._copies[key].state = CopyState.READING
            self._leaves.forget(key)
        self.touch(keys)
        return [self._copies[key].slot for key in keys]

    def end_read(self, key: PageKey, slot: int, digest: int | None) -> int | None:
        """Ends a read that found bytes with `digest`, None if it failed. Returns the copy's digest if it is intact."""
        if self._ends_dropped(slot):
            return None
        copy = self._copy_under(key, slot, CopyState.READING)
        copy.state = CopyState.PRESENT
        self._rank(key)
        return copy.digest if digest is not None and is_same(digest, copy.digest, self._num_parts) else None

    def drop(self, key: PageKey) -> list[int]:
        """Drops a copy and all its descendants; returns their slots, which the caller erases from the index."""
        if key not in self._copies:
            return []
        taken = self._subtree(key)
        return [self._remove(one) for one in reversed(taken)]

    def limit(self, num_slots: int) -> None:
        """Gives up the free slots from `num_slots` on, and the others there as soon as they are free."""
        self._limit = min(self._limit, num_slots)
        kept = [slot for slot in self._free if slot < self._limit]
        self.num_slots -= len(self._free) - len(kept)
        self._free = kept

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Makes the copies of a chain the most recently used; the first becomes the youngest."""
        for key in reversed(keys):
            if (copy := self._copies.get(key)) is not None:
                self._num_uses += 1
                copy.use.last_use = self._num_uses

    def check(self) -> None:
        """Raises `Broken` unless slots, copies and the order of eviction agree."""
        slots = [*self._free, *self._dropped, *(copy.slot for copy in self._copies.values())]
        if len(set(slots)) != len(slots) or len(slots) != self.num_slots:
            raise Broken(f"{len(slots)} slots are used or free, {len(set(slots))} different ones, of {self.num_slots}")
        children: dict[PageKey, int] = {}
        for copy in self._copies.values():
            if copy.parent is not None:
                if copy.parent not in self._copies:
                    raise Broken(f"slot {copy.slot} has a copy without the page before it")
                children[copy.parent] = children.get(copy.parent, 0) + 1
        for key, copy in self._copies.items():
            if copy.num_children != children.get(key, 0):
                raise Broken(f"slot {copy.slot} counts {copy.num_children} children, has {children.get(key, 0)}")
            if self._use_of_leaf(key) is not None and key not in self._leaves:
                raise Broken(f"slot {copy.slot} can be evicted and is in no order of eviction")

    def _copy_under(self, key: PageKey, slot: int, state: CopyState) -> _Copy:
        copy = self._copies.get(key)
        if copy is None or copy.slot != slot or copy.state is not state:
            raise Broken(f"slot {slot} has no copy that is {state.value}")
        return copy

    def _ends_dropped(self, slot: int) -> bool:
        """True if the I/O that ends was on a dropped copy, whose slot is free now."""
        if slot not in self._dropped:
            return False
        self._dropped.remove(slot)
        self._release(slot)
        return True

    def _add(self, key: PageKey, copy: _Copy) -> None:
        self._copies[key] = copy
        if copy.parent is not None:
            self._copies[copy.parent].num_children += 1
            self._leaves.forget(copy.parent)

    def _remove(self, key: PageKey) -> int:
        """Removes a copy without children; returns its slot."""
        copy = self._copies.pop(key)
        self._leaves.forget(key)
        if copy.parent is not None:
            self._copies[copy.parent].num_children -= 1
            self._rank(copy.parent)
        if copy.state is CopyState.PRESENT:
            self._release(copy.slot)
        else:
            self._dropped.add(copy.slot)
        return copy.slot

    def _release(self, slot: int) -> None:
        if slot < self._limit:
            self._free.append(slot)
        else:
            self.num_slots -= 1

    def _evict_for(self, parent: PageKey | None) -> bool:
        """Frees one slot, not that of `parent`. False if no copy can go."""
        key = self._leaves.pop(lambda one: None if one == parent else self._use_of_leaf(one))
        if key is not None:
            self._remove(key)
        if parent is not None:
            self._rank(parent)
        return bool(self._free)

    def _use_of_leaf(self, key: PageKey) -> PageUse | None:
        copy = self._copies.get(key)
        if copy is None or copy.num_children or copy.state is not CopyState.PRESENT:
            return None
        return copy.use

    def _rank(self, key: PageKey) -> None:
        if (use := self._use_of_leaf(key)) is not None:
            self._leaves.push(key, use)

    def _subtree(self, key: PageKey) -> list[PageKey]:
        """`key` and all its descendants, parents before children. Walks all copies: faults are rare."""
        children: dict[PageKey, list[PageKey]] = {}
        for child, copy in self._copies.items() if self._copies[key].num_children else ():
            if copy.parent is not None:
                children.setdefault(copy.parent, []).append(child)
        taken = [key]
        for one in taken:  # grows while it is read
            taken += children.get(one, ())
        return taken
