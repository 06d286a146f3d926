"""Window slots at their edges: what is final, worn, reserved for nobody, or read by others."""

from __future__ import annotations

import pytest

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, RequestId
from baton.engine.handoff.kv_export import ExportTable
from baton.kv.page_digests import PART_BITS, join_parts, without_window
from baton.kv.pages import Hold
from tests.unit.kv.windows.test_slots import cache_with, cached, keys, table_of

ID = AttemptId(RequestId("r"), 1)


def test_a_cached_page_cannot_get_its_window_part_back():
    """Without digests no page is settled; what is cached is final all the same."""
    cache, slots = cache_with(1)
    (page,) = cached(cache, slots, keys(1))
    others = cache.allocate(1, Hold.LIVE)
    assert others is not None
    assert slots.take(others), "the cached page has lost its own"
    slots.drop(others)
    with pytest.raises(Broken, match="final without its window part"):
        slots.take([page])
    assert slots.num_held == 0
    cache.pool.check()


def test_no_slot_is_retired_that_a_sequence_needs():
    cache, slots = cache_with(3)
    slots.least_slots = 3
    pages = cache.allocate(1, Hold.LIVE)
    assert pages is not None
    assert slots.take(pages)
    slots.record_fault(pages[0], 0.0)
    slots.record_fault(pages[0], 1.0)
    slots.drop(pages)
    assert slots.counts() == {"free": 3, "held": 0, "unheld": 0, "retired": 0}


def test_more_slots_than_there_are_cannot_be_reserved():
    cache, slots = cache_with(4)
    table = table_of(cache, 80)
    assert not table.reserve_windows(40, 32)
    assert not table.reserve_windows(40)
    assert slots.num_unreserved == 4
    assert table.reserve_windows(40, 1)


def test_a_duplicate_that_others_read_keeps_its_slot_and_its_holds():
    """An export has its window part pinned by its number. Moved to another page, the export could not drop it."""
    cache, slots = cache_with(4)
    chain = keys(2)
    cached(cache, slots, chain)
    own = cache.allocate(2, Hold.LIVE)
    assert own is not None
    assert slots.take(own)
    exports = ExportTable(cache.pool, 5.0)
    exports.open(ID)
    exports.publish(ID, own[1:], 0.0, windowed=own[1:])
    exports.seal(ID)
    used = cache.insert(None, chain, own, Hold.LIVE)
    assert len(used) == 1, "the second one is read"
    slots.drop([*used, own[1]])
    cache.pool.drop([*used, own[1]], Hold.LIVE)
    assert exports.commit(ID)
    assert slots.num_held == 0
    assert slots.num_unreserved == 4
    cache.pool.check()
    cache.check()


@pytest.mark.parametrize("had_window", [True, False])
@pytest.mark.parametrize("has_window", [True, False])
def test_a_page_is_judged_by_what_it_had_and_has(had_window: bool, has_window: bool):
    cache, slots = cache_with(1)
    pages = cache.allocate(1, Hold.LIVE)
    assert pages is not None
    (whole,) = join_parts([11, 22], 2)
    if has_window:
        assert slots.take(pages)
    fits, absent = cache.pool.digests.fits, without_window(whole, 2)
    found, announced = (whole if has_window else absent), (whole if had_window else absent)
    assert fits(pages[0], found, announced)
    assert not fits(pages[0], found ^ 1, announced), "the rest is compared always"
    assert fits(pages[0], found ^ 1 << PART_BITS, announced) is not (had_window and has_window)
