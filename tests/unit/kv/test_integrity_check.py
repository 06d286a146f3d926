"""The idle check: bounded slices, complete rounds, and rounds that continue after an interruption."""

from __future__ import annotations

import pytest

from baton.domain.errors import Broken
from baton.kv.integrity_check import IntegrityCheck
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache

NUM_PAGES = 10


def run_round(check: IntegrityCheck) -> None:
    while not check.done:
        check.run_slice()


class RecordingPool(PagePool):
    """Records the checked pages."""

    def __init__(self) -> None:
        super().__init__(NUM_PAGES)
        self.slices: list[range] = []

    def check_pages(self, start: int, stop: int) -> None:
        self.slices.append(range(start, stop))
        super().check_pages(start, stop)


def test_a_round_looks_at_every_page_once_in_bounded_slices():
    pool = RecordingPool()
    check = IntegrityCheck(PrefixCache(pool), max_slice_pages=4)
    run_round(check)
    assert pool.slices == [range(4), range(4, 8), range(8, 10)]


def test_an_interrupted_round_goes_on_where_it_stopped():
    pool = RecordingPool()
    check = IntegrityCheck(PrefixCache(pool), max_slice_pages=4)
    check.run_slice()
    check.restart()
    run_round(check)
    assert pool.slices == [range(4), range(4, 8), range(8, 10), range(4)]


def test_without_a_bound_one_slice_is_the_whole_check():
    pool = PagePool(NUM_PAGES)
    pool._num_owned[1] += 1  # totals, which only the whole check counts
    check = IntegrityCheck(PrefixCache(pool))
    with pytest.raises(Broken, match="counts"):
        check.run_slice()


def test_a_wrong_page_is_found_within_one_round():
    pool = RecordingPool()
    pages = pool.allocate(1, Hold.LIVE)
    assert pages is not None
    check = IntegrityCheck(PrefixCache(pool), max_slice_pages=1)
    check.run_slice()
    pool._holds[Hold.LIVE][pages[0]] = 0
    check.restart()
    with pytest.raises(Broken, match="is counted as LIVE"):
        run_round(check)
