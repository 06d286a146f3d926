"""Host tiers below a pool whose window parts have slots: what is copied, and where a prompt can go on from."""

from __future__ import annotations

import pytest

from baton.kv.keys import page_keys
from baton.settings.tiers import TierWrite
from tests.tiny_workers import PAGE_SIZE
from tests.unit.host_tier.host_world import HostWorld

LONG = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]
OTHER = [1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1]
KEYS = page_keys(LONG, PAGE_SIZE, "")


def world(write: TierWrite, num_window_slots: int) -> HostWorld:
    return HostWorld([write], num_window_slots=num_window_slots)


@pytest.mark.parametrize("num_window_slots", [6, 8])
def test_what_comes_back_from_a_tier_has_the_window_parts_of_its_end(num_window_slots: int):
    """Its copies were made as its pages were filled, before the next ones took their slots."""
    made = world(TierWrite.THROUGH, num_window_slots)
    made.ask(LONG)
    made.ask(OTHER)
    made.ask(OTHER)
    seal = made.ask(LONG)
    assert seal.num_from_tiers == {"host": 6}, "two pages are on the device still"
    assert seal.times.cached_tokens == 10


def test_a_read_ends_where_a_prompt_can_go_on():
    """The copies were made when the pages left, some of them after their window parts. Behind the fourth page a prompt
    would read its window part, which is not there; behind the third, that one's."""
    made = world(TierWrite.BACK, 5)
    made.ask(LONG)
    made.ask(OTHER)
    made.ask(OTHER)
    (tier,) = made.tiers
    assert [tier.is_windowless(key) for key in KEYS] == [False, False, False, True, False]
    branch = [*LONG[:8], 0, 1, 0]
    assert [one == other for one, other in zip(page_keys(branch, PAGE_SIZE, ""), KEYS, strict=True)] == [True] * 4 + [
        False
    ]
    seal = made.ask(branch)
    assert (seal.times.cached_tokens, made.num_turns) == (6, 2), "it is read in the first step, and waits for nothing"
    assert made.ask(LONG).times.cached_tokens == 10, "the copy of the last page has its window part"


def test_a_damaged_copy_of_a_window_part_is_not_used():
    made = world(TierWrite.THROUGH, 8)
    made.ask(LONG)
    made.ask(OTHER)
    made.ask(OTHER)
    (tier,), (memory,) = made.tiers, made.copies
    last = KEYS[4]
    slot = tier.slot(last)
    assert slot is not None
    assert not tier.is_windowless(last)
    memory.page(slot)[-1] ^= 1
    seal = made.ask(LONG)
    assert seal.num_from_tiers == {"host": 4}
    assert tier.slot(last) is None, "the copy was dropped"
