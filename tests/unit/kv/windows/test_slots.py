"""Window slots: who has one, which goes first, and what is reserved."""

from __future__ import annotations

import pytest
import xxhash

from baton.domain.errors import Broken
from baton.domain.ids import PageId, PageKey
from baton.engine.overlap.page_fence import PageFence
from baton.kv.geometry import PageWindow
from baton.kv.page_digests import (
    ABSENT_DIGEST,
    FAULT_WINDOW_S,
    PART_BITS,
    is_same,
    join_parts,
    without_window,
)
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.windows.slots import NO_SLOT, WindowSlots

SIZE, WINDOW = 4, PageWindow(10, 4, 1)
NUM_PAGES = 24


def keys(num_pages: int, label: str = "k") -> list[PageKey]:
    return [PageKey(f"{label}{number}".encode()) for number in range(num_pages)]


def cache_with(num_slots: int) -> tuple[PrefixCache, WindowSlots]:
    cache = PrefixCache(PagePool(NUM_PAGES))
    cache.window = WINDOW
    return cache, cache.pool.add_window_slots(num_slots, 2)


def cached(cache: PrefixCache, slots: WindowSlots, chain: list[PageKey]) -> list[PageId]:
    """Enters a chain of pages, each of which has had a slot, and drops its holds."""
    pages = cache.allocate(len(chain), Hold.LIVE)
    assert pages is not None
    for page in pages:
        assert slots.take([page])
    used = cache.insert(None, chain, pages, Hold.LIVE)
    slots.drop(used)
    cache.pool.drop(used, Hold.LIVE)
    return used


def test_the_absent_digest_is_that_of_no_bytes():
    assert xxhash.xxh3_64_intdigest(b"") == ABSENT_DIGEST


def test_a_page_begins_without_a_slot_and_gives_it_back_when_it_is_freed():
    cache, slots = cache_with(2)
    pages = cache.allocate(2, Hold.LIVE)
    assert pages is not None
    assert all(map(cache.pool.digests.is_windowless, pages))
    assert slots.take(pages)
    assert not any(map(cache.pool.digests.is_windowless, pages))
    assert sorted(slots.slots(pages)) == [0, 1]
    slots.drop(pages[:1])
    assert (slots.slots(pages[:1]), slots.num_free) == ((NO_SLOT,), 1), "it is not cached"
    slots.drop(pages[1:])
    cache.pool.drop(pages, Hold.LIVE)
    assert slots.counts() == {"free": 2, "held": 0, "unheld": 0, "retired": 0}
    cache.pool.check()


def test_a_held_window_part_is_not_evicted():
    cache, slots = cache_with(3)
    (first, second) = cached(cache, slots, keys(2))
    slots.hold([first])
    pages = cache.allocate(2, Hold.LIVE)
    assert pages is not None
    assert slots.take(pages)
    assert (slots.slots([first])[0] != NO_SLOT, slots.slots([second])) == (True, (NO_SLOT,))
    third = cache.allocate(1, Hold.LIVE)
    assert third is not None
    assert not slots.take(third)
    assert slots.slots(third) == (NO_SLOT,)


def test_slots_that_are_asked_for_again_are_not_evicted_for_the_others():
    cache, slots = cache_with(2)
    pages = cached(cache, slots, keys(2))
    new = cache.allocate(1, Hold.LIVE)
    assert new is not None
    assert not slots.take([*pages, *new]), "two are kept, and there is no third"
    assert slots.num_unheld == 2


def test_what_was_passed_goes_first_unless_a_match_has_used_it():
    cache, slots = cache_with(4)
    first, second, third, fourth = cached(cache, slots, keys(4))
    slots.hold([third])
    slots.drop([third], passed=True)
    slots.hold([second], matched=True)
    slots.drop([second], passed=True)
    evicted = []
    for page in cache.allocate(4, Hold.LIVE) or []:
        before = [one for one in (first, second, third, fourth) if slots.slots([one])[0] != NO_SLOT]
        assert slots.take([page])
        evicted += [one for one in before if slots.slots([one])[0] == NO_SLOT]
    assert evicted == [third, first, fourth, second]
    assert slots.num_evicted == 4
    cache.check()
    cache.pool.check()


def test_an_evicted_window_part_leaves_its_page_cached():
    cache, slots = cache_with(4)
    chain = keys(4)
    cached(cache, slots, chain)
    assert cache.num_matching(chain) == 4
    assert slots.take(cache.allocate(1, Hold.LIVE) or [])
    assert len(cache) == 4
    assert cache.num_matching(chain) == 4, "the token behind them reads pages 1 to 3"
    assert cache.num_matching(chain[:3]) == 0


def test_a_duplicate_gives_its_slot_to_the_cached_page_though_that_is_held():
    cache, slots = cache_with(8)
    chain = keys(4)
    held = cached(cache, slots, chain)
    for page in held:
        slots.hold([page])
    cache.pool.hold(held, Hold.LIVE)
    slots.drop(held)
    others = cache.allocate(8, Hold.LIVE)
    assert others is not None
    assert slots.take(others)
    assert slots.slots(held) == (NO_SLOT,) * 4, "all four are evicted"
    slots.drop(others)
    again = cache.allocate(4, Hold.LIVE)
    assert again is not None
    assert slots.take(again)
    given = slots.slots(again)
    assert cache.insert(None, chain, again, Hold.LIVE) == held
    assert slots.slots(held) == given
    assert slots.num_held == 4, "the holds have moved as well"
    cache.check()
    slots.check()


def test_a_settled_page_cannot_get_its_window_part_back():
    cache, slots = cache_with(2)
    pages = cache.allocate(1, Hold.LIVE)
    assert pages is not None
    cache.pool.digests.set(pages[0], 7)
    with pytest.raises(Broken, match="final without its window part"):
        slots.take(pages)


def test_a_digest_follows_its_window_part():
    cache, slots = cache_with(2)
    digests, pages = cache.pool.digests, cache.allocate(2, Hold.LIVE)
    assert pages is not None
    (digest,) = join_parts([11, 22], 2)
    assert slots.take(pages[:1])
    digests.set(pages[0], digest)
    assert digests.digest(pages[0]) == digest
    digests.set(pages[1], digest)
    absent = without_window(digest, 2)
    assert digests.digest(pages[1]) == absent == 11 | ABSENT_DIGEST << PART_BITS
    assert (digests.as_it_is(pages[0], digest), digests.as_it_is(pages[1], digest)) == (digest, absent)
    slots.replace(pages[0], pages[1])
    assert (digests.digest(pages[0]), digests.digest(pages[1])) == (absent, digest)
    assert is_same(digest, absent, 2)
    assert is_same(without_window(digest, 2), digest, 2) is False
    assert is_same(12 | 22 << PART_BITS, absent, 2) is False
    assert is_same(ABSENT_DIGEST, ABSENT_DIGEST + 1, 1) is False, "a page of one part has no window part"


def test_reservations_are_bounded_by_the_slots():
    _, slots = cache_with(5)
    assert slots.reserve(3)
    assert not slots.reserve(3)
    assert slots.reserve(2)
    assert slots.reserve(2, forced=True)
    assert not slots.reserve(1)
    assert slots.num_unreserved == -2
    assert slots.reserve(-7)
    with pytest.raises(Broken, match="more window slots"):
        slots.reserve(-1)


def test_a_slot_with_two_faults_is_retired_when_it_can_be_spared():
    cache, slots = cache_with(3)
    pages = cache.allocate(3, Hold.LIVE)
    assert pages is not None
    assert slots.take(pages)
    slots.record_fault(pages[0], 0.0)
    slots.record_fault(pages[0], FAULT_WINDOW_S)
    slots.record_fault(pages[1], 0.0)
    slots.record_fault(pages[1], FAULT_WINDOW_S + 1.0)
    slots.drop(pages)
    assert slots.counts() == {"free": 2, "held": 0, "unheld": 0, "retired": 1}
    slots.check()
    assert slots.take(pages[:1])
    slots.record_fault(pages[0], 1.0)
    slots.record_fault(pages[0], 2.0)
    assert slots.reserve(2)
    slots.drop(pages[:1])
    assert slots.num_retired == 1, "both slots that are left are reserved"
    cache.pool.check()


def test_a_fenced_slot_is_taken_by_nobody_before_its_step_ends():
    cache, slots = cache_with(3)
    (kept, lost) = cached(cache, slots, keys(2))
    fence = PageFence(cache.pool)
    fence.on_started()
    cache.pool.hold([kept, lost], Hold.LIVE)
    fence.hold([kept, lost])
    assert slots.num_unreserved == 1
    cache.pool.drop([kept, lost], Hold.LIVE)
    cache.quarantine(keys(2)[1])
    new = cache.allocate(3, Hold.LIVE)
    assert new is not None
    assert not slots.take(new[:2]), "of three slots two are under the step"
    assert slots.take(new[:1])
    assert slots.counts() == {"free": 0, "held": 1, "unheld": 2, "retired": 0}
    cache.pool.check()
    fence.on_ended()
    assert slots.counts() == {"free": 1, "held": 1, "unheld": 1, "retired": 0}
    assert slots.take(new[1:])
    assert slots.num_unreserved == 3
    cache.pool.check()


def test_a_slot_may_pass_to_a_cached_page_under_a_fence():
    cache, slots = cache_with(2)
    chain = keys(1)
    (old,) = cached(cache, slots, chain)
    others = cache.allocate(2, Hold.LIVE)
    assert others is not None
    assert slots.take(others), "the cached page has lost its own"
    fence = PageFence(cache.pool)
    fence.on_started()
    fence.hold(others[:1])
    given = slots.slots(others[:1])
    assert cache.insert(None, chain, others[:1], Hold.LIVE) == [old]
    assert slots.slots([old]) == given
    fence.on_ended()
    assert slots.slots([old]) == given
    cache.pool.check()


def test_a_step_that_ends_frees_what_was_given_up_under_it():
    cache, slots = cache_with(2)
    chain = keys(1)
    (old,) = cached(cache, slots, chain)
    own = cache.allocate(1, Hold.LIVE)
    assert own is not None
    assert slots.take(own)
    fence = PageFence(cache.pool)
    fence.on_started()
    fence.hold(own)
    assert cache.insert(None, chain, own, Hold.LIVE) == [old]
    assert slots.num_free == 0, "the row's own page gave way, and a step reads its slot"
    cache.pool.check()
    fence.on_ended()
    assert slots.num_free == 1
    cache.pool.check()


def table_of(cache: PrefixCache, num_tokens: int) -> PageTable:
    table = PageTable(cache, SIZE, "", Hold.LIVE)
    assert table.extend(num_tokens)
    return table


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 16])
def test_a_reservation_is_enough_for_every_step_of_so_many_tokens(num_tokens: int):
    cache, slots = cache_with(NUM_PAGES)
    table = table_of(cache, NUM_PAGES * SIZE)
    assert table.reserve_windows(num_tokens)
    most = 0
    for start in range(NUM_PAGES * SIZE - num_tokens):
        table.pass_windows(start)
        table.cover_windows(start, start + num_tokens)
        read = range(max(0, start - WINDOW.num_tokens + 1), start + num_tokens)
        assert all(slots.slots([table.pages[at // SIZE]])[0] != NO_SLOT for at in read)
        assert (table.max_step_tokens(start) or 0) >= num_tokens
        most = max(most, slots.num_held)
    assert most == WINDOW.most_pages(num_tokens), "and no more"
    table.release()
    assert slots.counts() == {"free": NUM_PAGES, "held": 0, "unheld": 0, "retired": 0}
    assert slots.num_unreserved == NUM_PAGES


def test_a_table_takes_no_more_than_it_reserved():
    cache, slots = cache_with(NUM_PAGES)
    table = table_of(cache, 40)
    assert table.reserve_windows(2)
    with pytest.raises(Broken, match="no window slots"):
        table.cover_windows(0, 40)
    assert slots.num_held == 0


def test_steps_that_would_take_more_than_half_of_the_slots_are_shorter():
    cache, slots = cache_with(10)
    table = table_of(cache, 80)
    assert table.reserve_windows(64, SIZE)
    assert slots.num_unreserved == 5
    assert table.max_step_tokens(0) == 5 * SIZE
    assert table.max_step_tokens(40) == (7 + 5) * SIZE - 40


def test_a_dropped_draft_page_gives_its_slot_back():
    cache, slots = cache_with(8)
    table = table_of(cache, 12)
    assert table.reserve_windows(9)
    table.cover_windows(0, 12)
    table.shrink(5)
    assert (len(table.pages), slots.num_held) == (2, 2)
    table.release()
    cache.pool.check()


def test_a_match_holds_the_window_parts_that_are_read_behind_it():
    cache, slots = cache_with(8)
    chain = keys(6)
    pages = cached(cache, slots, chain)
    table = PageTable(cache, SIZE, "", Hold.LIVE)
    assert table.match(chain) == 24
    assert (slots.num_held, slots.num_unheld) == (3, 3)
    assert table.reserve_windows(1)
    assert table.extend(25)
    table.cover_windows(24, 25)
    assert [slots.slots([page])[0] != NO_SLOT for page in table.pages] == [True] * 7
    table.release()
    assert slots.num_unheld == 6
    assert set(pages) == {page for page in range(NUM_PAGES) if slots.slots([PageId(page)])[0] != NO_SLOT}


def test_an_import_needs_window_parts_before_its_own_end_only():
    cache, slots = cache_with(8)
    chain = keys(6)
    cached(cache, slots, chain)
    assert slots.take(cache.allocate(6, Hold.LIVE) or []), "four of the first six are evicted"
    table = PageTable(cache, SIZE, "", Hold.LIVE)
    assert table.match(chain[:3]) == 0
    assert table.match(chain[:3], next_position=40) == 12
    assert table.windowless(3) == [0, 1, 2]
    assert slots.num_held == 6
    table.release()
