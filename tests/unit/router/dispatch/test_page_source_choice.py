"""Which worker a router names as the source of a prompt's cached pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import LinkRecord, WorkerRecord, WorkerRole, WorkerStatus
from baton.kv.keys import page_keys
from baton.services.router.dispatch.cache_index.index import CacheIndex
from baton.services.router.dispatch.cache_index.page_source import choose_page_source
from baton.services.router.dispatch.placement.pair import Pair

SIZE = 16
KEYS = page_keys(range(10 * SIZE), SIZE, "")


def worker(role: WorkerRole, number: int) -> WorkerRecord:
    incarnation = Incarnation(10 * number + (role is WorkerRole.DECODE))
    return WorkerRecord(WorkerId(f"{role.value}-{number}"), role, incarnation, "", "m", "f", SIZE, 4096, 100)


DECODE, OTHER = worker(WorkerRole.DECODE, 1), worker(WorkerRole.PREFILL, 2)


def link(to: WorkerRecord, bandwidth: float = 1e9) -> LinkRecord:
    return LinkRecord(to.id, to.incarnation, "stream", bandwidth, 1)


PREFILL = replace(worker(WorkerRole.PREFILL, 1), links=(link(DECODE), link(OTHER)))


def index(**num_pages: int) -> CacheIndex:
    """An index in which `prefill`, `decode` and `other` have so many of the keys."""
    index = CacheIndex()
    for name, record in (("prefill", PREFILL), ("decode", DECODE), ("other", OTHER)):
        index.clear(record.incarnation)
        index.update(record.incarnation, KEYS[: num_pages.get(name, 0)], [])
    return index


def named(
    index: CacheIndex,
    decode_prefix_len: int = 0,
    prefill: WorkerRecord = PREFILL,
    *away: WorkerRecord,
    left: dict[WorkerRecord, int] | None = None,
):
    workers = {one.incarnation: one for one in (prefill, DECODE, OTHER)}
    workers |= {one.incarnation: one for one in away}
    known = {DECODE.incarnation: decode_prefix_len}
    known |= {worker.incarnation: num_tokens for worker, num_tokens in (left or {}).items()}
    choice = choose_page_source(Pair(prefill, DECODE), KEYS, known, workers, index, 0.0)
    return None if choice is None else (choice.worker.id, choice.num_pages)


def test_the_worker_with_the_longest_prefix_is_named():
    assert named(index(prefill=2, decode=5, other=7)) == ("prefill-2", 7)
    assert named(index(prefill=2, decode=9, other=7)) == ("decode-1", 9)


def test_decode_has_told_its_prefix_with_the_reservation():
    assert named(index(prefill=2), decode_prefix_len=6 * SIZE) == ("decode-1", 6)
    assert named(index(prefill=2), decode_prefix_len=11 * SIZE) == ("decode-1", 10), "no more than prefill can match"


def test_a_worker_that_has_sent_the_row_back_needs_no_events():
    left = {OTHER: 10 * SIZE + 3}
    assert named(index(prefill=2), left=left) == ("prefill-2", 10)
    assert named(index(prefill=9), left=left) is None, "prefill has nearly all of it"
    assert named(index(prefill=2), 0, replace(PREFILL, links=(link(DECODE),)), left=left) is None


@pytest.mark.parametrize("own", [6, 7, 10])
def test_a_page_more_is_not_worth_it(own: int):
    assert named(index(prefill=own, decode=7)) is None


def test_pages_that_prefill_is_about_to_have_count():
    expecting = index(decode=7)
    expecting.expect(PREFILL.incarnation, KEYS, 0.0)
    assert named(expecting) is None


def test_pages_that_a_source_is_only_expected_to_have_do_not():
    expecting = index()
    expecting.expect(DECODE.incarnation, KEYS, 0.0)
    assert named(expecting) is None


def test_a_source_is_linked_alive_and_takes_requests():
    assert named(index(decode=9), 0, replace(PREFILL, links=())) is None
    assert named(index(decode=9), 0, PREFILL, replace(DECODE, status=WorkerStatus.DRAINING)) is None
    restarted = replace(PREFILL, links=(replace(link(DECODE), prefill_incarnation=Incarnation(99)),))
    assert named(index(decode=9), 0, restarted) is None


def test_of_equal_sources_the_faster_link_is_named():
    fast = replace(PREFILL, links=(link(DECODE), link(OTHER, 2e9)))
    assert named(index(decode=5, other=5), 0, fast) == ("prefill-2", 5)
