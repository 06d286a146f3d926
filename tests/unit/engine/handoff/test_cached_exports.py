"""What a cache gives to another one: which pages, under which bounds, and how it ends."""

from __future__ import annotations

import pytest

from baton.domain.errors import PageVerdict, Superseded
from baton.domain.handoff import Suspect
from baton.kv.geometry import PageWindow
from baton.kv.pages import Hold, Owner
from baton.kv.windows.slots import NO_SLOT
from tests.property.machines.page_sharing_machine import PAGE_SIZE
from tests.unit.engine.handoff.cache_pair import KEYS, Giver, attempt


def test_the_pages_that_an_importer_lacks_are_announced_and_pinned():
    giver = Giver()
    giver.fill(KEYS[:5])
    chunk = giver.cached.open(attempt("a"), KEYS, 2, now=0.0)
    assert chunk.first_page == 2
    assert list(chunk.pages) == [giver.cache.find(key) for key in KEYS[2:5]]
    assert chunk.digests == tuple(map(giver.cache.pool.digests.digest, chunk.pages))
    assert giver.cache.pool.num_owned(Owner.PINNED) == 5, "from the root on"
    assert giver.exports.commit(attempt("a")), "it is sealed from the start"
    assert giver.cache.pool.num_owned(Owner.PINNED) == 0
    assert len(giver.cache) == 5


def test_an_export_that_nobody_renews_ends_with_its_lease():
    giver = Giver()
    giver.fill(KEYS[:3])
    giver.cached.open(attempt("a"), KEYS, 0, now=0.0)
    assert giver.exports.expire(5.0) == [attempt("a")]
    assert giver.cache.pool.num_owned(Owner.PINNED) == 0


def test_nothing_is_opened_for_what_is_not_there():
    giver = Giver()
    giver.fill(KEYS[:2])
    assert giver.cached.open(attempt("a"), KEYS, 2, now=0.0).pages == ()
    assert len(giver.exports) == 0


def test_pages_without_their_window_part_are_not_given():
    """The importer reads whole pages, and would take the rest of these for KV."""
    giver = Giver()
    giver.cache.window = PageWindow(4, PAGE_SIZE, 1)
    giver.fill(KEYS[:6])
    pages = [giver.cache.page_of(key) for key in KEYS[:6]]
    giver.cache.pool.digests.mark_windowless(pages[2:4])
    assert giver.cached.open(attempt("a"), KEYS, 0, now=0.0).pages == tuple(pages[:2])
    assert giver.cache.pool.num_owned(Owner.PINNED) == 2
    assert giver.cached.open(attempt("b"), KEYS, 2, now=0.0).pages == ()
    assert giver.cache.pool.num_owned(Owner.LIVE) == 0, "its matched pages are released"


def test_an_attempt_has_one_export():
    giver = Giver()
    giver.fill(KEYS[:2])
    giver.cached.open(attempt("a"), KEYS, 0, now=0.0)
    with pytest.raises(Superseded):
        giver.cached.open(attempt("a"), KEYS, 0, now=0.0)
    assert giver.cache.pool.num_owned(Owner.LIVE) == 0, "its matched pages are released"


def test_pages_that_others_hold_are_given_beyond_the_bound():
    """The next turn of a conversation: the reservation at decode holds the pages already."""
    giver = Giver(max_pages=2)
    giver.fill(KEYS[:6])
    assert len(giver.cached.open(attempt("a"), KEYS, 0, now=0.0).pages) == 2
    assert giver.cached.open(attempt("b"), KEYS[2:], 0, now=0.0).pages == (), "the bound is for all exports together"
    reserved = giver.cache.match(KEYS[:4], Hold.RESERVED)
    assert list(giver.cached.open(attempt("c"), KEYS, 0, now=0.0).pages) == reserved
    giver.exports.commit(attempt("a"))
    assert len(giver.cached.open(attempt("d"), KEYS, 0, now=0.0).pages) == 6


def test_no_page_is_pinned_that_a_reservation_counts_on():
    giver = Giver()
    giver.fill(KEYS[:6])
    giver.num_counted_on = giver.cache.num_available - 1
    assert len(giver.cached.open(attempt("a"), KEYS, 0, now=0.0).pages) == 1
    assert giver.cache.num_available == giver.num_counted_on


def test_suspects_are_compared_with_what_was_announced():
    giver = Giver()
    giver.fill(KEYS[:2])
    chunk = giver.cached.open(attempt("a"), KEYS, 0, now=0.0)
    assert chunk.digests is not None
    suspect = Suspect(0, chunk.pages[0], chunk.digests[0])
    assert giver.cached.examine(attempt("a"), [suspect]) == (PageVerdict.LINK, [])
    giver.memory.write([chunk.pages[0]], [memoryview(bytearray(16))])
    assert giver.cached.examine(attempt("a"), [suspect]) == (PageVerdict.SOURCE, [chunk.pages[0]])
    assert giver.cached.examine(attempt("z"), [suspect]) == (None, [])
    assert giver.cached.find_wrong(KEYS) == [chunk.pages[0]], "it would be found before the next export"


def test_only_slots_that_are_kept_for_the_importer_are_announced():
    """Those before the window of the end may go to other pages while they are read."""
    giver = Giver(num_window_slots=8)
    giver.fill(KEYS[:6])
    window, windows = giver.cache.window, giver.cache.pool.windows
    assert window is not None
    assert windows is not None
    chunk = giver.cached.open(attempt("a"), KEYS, 0, now=0.0)
    edge = window.first_page(6 * PAGE_SIZE)
    assert 0 < edge < 6
    assert chunk.window_slots == (NO_SLOT,) * edge + windows.slots(chunk.pages[edge:])
    assert windows.num_held == 6 - edge
    assert windows.num_unheld == edge, "they are there, and nothing holds them"
