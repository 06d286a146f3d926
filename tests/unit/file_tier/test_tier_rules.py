"""Rules of the file tier's bookkeeping, in a tiny world with random operations."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import Broken
from baton.domain.ids import PageKey
from baton.kv.tiers.tier import CacheTier, CopyState, SlotEntry
from tests.tiny_workers import REPEATABLE_SETTINGS

KEYS = [PageKey(bytes([number]) * 16) for number in range(1, 13)]
PARENTS = [None if number < 2 else KEYS[number // 2 - 1] for number in range(len(KEYS))]
"""A tree: each page has two children."""


def digest(number: int) -> int:
    return 100 + number


class _World:
    """The tier, and the bytes of its slots as numbers of pages; -1 after a fault."""

    def __init__(self, num_slots: int) -> None:
        self.tier = CacheTier(num_slots)
        self.disk: dict[int, int] = {}
        self.writes: list[tuple[int, int]] = []  # (page, slot)
        self.reads: list[tuple[int, int]] = []

    def begin_write(self, number: int) -> None:
        slot = self.tier.begin_write(KEYS[number], PARENTS[number], digest(number))
        if slot is not None:
            busy = [used for _, used in self.writes + self.reads]
            assert slot not in busy, "the slot of a copy under I/O was given away"
            self.writes.append((number, slot))

    def end_write(self, ok: bool) -> None:
        if self.writes:
            number, slot = self.writes.pop(0)
            self.disk[slot] = number if ok else -1
            self.tier.end_write(KEYS[number], slot, ok=ok)

    def begin_read(self, number: int) -> None:
        chain: list[int] = []
        at: int | None = number
        while at is not None:
            chain.insert(0, at)
            parent = PARENTS[at]
            at = None if parent is None else KEYS.index(parent)
        keys = [KEYS[one] for one in chain]
        num_pages = self.tier.num_matching(keys)
        for one in chain[:num_pages]:
            slot = self.tier.slot(KEYS[one])
            assert slot is not None
            assert not any(slot == other for _, other in self.writes), "a copy was matched before its write ended"
        if any(self.tier.state(key) is not CopyState.PRESENT for key in keys[:num_pages]):
            return  # the product reads one chain at a time
        for one, slot in zip(chain, self.tier.begin_read(keys[:num_pages]), strict=False):
            self.reads.append((one, slot))

    def end_read(self) -> None:
        if self.reads:
            number, slot = self.reads.pop(0)
            stored = self.disk.get(slot, -1)
            intact = self.tier.end_read(KEYS[number], slot, digest(stored) if stored >= 0 else None)
            assert intact is None or stored == number, "wrong bytes would enter the cache"
            if intact is None and self.tier.slot(KEYS[number]) == slot:
                self.tier.drop(KEYS[number])

    def flip(self, slot: int) -> None:
        if slot in self.disk:
            self.disk[slot] = -1

    def drop(self, number: int) -> None:
        self.tier.drop(KEYS[number])
        assert KEYS[number] not in self.tier
        assert not any(
            parent == KEYS[number] and key in self.tier for key, parent in zip(KEYS, PARENTS, strict=True)
        ), "what was computed from a wrong page stays"


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["write", "wrote", "failed", "read", "ended", "flip", "drop", "limit"]), st.integers(0, 11)
    ),
    max_size=60,
)


@REPEATABLE_SETTINGS
@given(OPERATIONS, st.integers(1, 6))
def test_slots_copies_and_order_always_agree(operations: list[tuple[str, int]], num_slots: int) -> None:
    world = _World(num_slots)
    for name, number in operations:
        match name:
            case "write":
                world.begin_write(number)
            case "wrote" | "failed":
                world.end_write(name == "wrote")
            case "read":
                world.begin_read(number)
            case "ended":
                world.end_read()
            case "flip":
                world.flip(number)
            case "drop":
                world.drop(number)
            case "limit":
                world.tier.limit(max(1, number))
        world.tier.check()
    while world.writes or world.reads:
        world.end_write(True)
        world.end_read()
    world.tier.check()
    assert world.tier.num_free + len(world.tier) == world.tier.num_slots


def written(tier: CacheTier, *numbers: int) -> None:
    for number in numbers:
        slot = tier.begin_write(KEYS[number], PARENTS[number], digest(number))
        assert slot is not None
        tier.end_write(KEYS[number], slot, ok=True)


def test_a_copy_is_matched_only_after_its_write() -> None:
    tier = CacheTier(2)
    slot = tier.begin_write(KEYS[0], None, digest(0))
    assert slot is not None
    assert tier.num_matching(KEYS[:1]) == 0
    tier.end_write(KEYS[0], slot, ok=True)
    assert tier.num_matching(KEYS[:1]) == 1


def test_a_copy_needs_that_of_the_page_before_it() -> None:
    tier = CacheTier(4)
    assert tier.begin_write(KEYS[2], KEYS[0], digest(2)) is None
    written(tier, 0, 2)
    assert len(tier) == 2


def test_the_oldest_leaf_goes_first() -> None:
    tier = CacheTier(3)
    written(tier, 0, 1, 2)  # 2 follows 0
    tier.touch([KEYS[0], KEYS[2]])
    written(tier, 3)  # follows 0
    assert KEYS[1] not in tier
    assert KEYS[0] in tier
    assert tier.begin_write(KEYS[1], None, digest(1)) is not None
    assert KEYS[2] not in tier, "3 is younger"


def test_other_bytes_are_a_miss() -> None:
    tier = CacheTier(1)
    written(tier, 0)
    slot = tier.begin_read(KEYS[:1])[0]
    assert tier.end_read(KEYS[0], slot, digest(0) ^ 1) is None
    assert tier.begin_read(KEYS[:1]) == [slot]
    assert tier.end_read(KEYS[0], slot, digest(0)) == digest(0)


def test_only_present_copies_are_read() -> None:
    tier = CacheTier(1)
    with pytest.raises(Broken):
        tier.begin_read(KEYS[:1])


def test_a_restored_copy_has_its_parent() -> None:
    tier = CacheTier(4)
    entries = [SlotEntry(number, KEYS[number], PARENTS[number], digest(number)) for number in (0, 2)]
    orphan, outside = SlotEntry(3, KEYS[5], PARENTS[5], 1), SlotEntry(9, KEYS[1], None, 1)
    tier.restore([*entries, orphan, outside])
    tier.check()
    assert len(tier) == 2
    assert tier.num_matching([KEYS[0], KEYS[2], KEYS[5]]) == 2


def test_seeds_of_random_chains_restore_as_written() -> None:
    rng = random.Random(1)
    tier = CacheTier(12)
    for number in rng.sample(range(12), 12):
        slot = tier.begin_write(KEYS[number], PARENTS[number], digest(number))
        if slot is not None:
            tier.end_write(KEYS[number], slot, ok=True)
    slots = {key: tier.slot(key) for key in KEYS if key in tier}
    entries = [SlotEntry(slot, key, PARENTS[KEYS.index(key)], 7) for key, slot in slots.items() if slot is not None]
    again = CacheTier(12)
    again.restore(rng.sample(entries, len(entries)))
    again.check()
    assert {key: again.slot(key) for key in KEYS if key in again} == slots
