"""Names the worker whose cached pages of a prompt a prefill worker may import. Called by `workers`; pure.

A source is linked to the prefill worker, takes requests, and its own events confirm at least `MIN_GAIN_PAGES` more
leading pages than prefill has or is expected to have. Two need no events: the decode worker of the pair has told the
length of its prefix with the reservation, and one that has sent the row back keeps its pages for the next attempt. The
prefill worker decides whether importing is cheaper than computing: it measures both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.domain.ids import Incarnation, PageKey
from baton.domain.worker import WorkerRecord, WorkerStatus
from baton.services.router.dispatch.cache_index.index import CacheIndex
from baton.services.router.dispatch.placement.pair import Pair

MIN_GAIN_PAGES = 2
"""One page is computed sooner than it is asked for."""


@dataclass(frozen=True, slots=True)
class PageSourceChoice:
    """The worker that has the first `num_pages` pages of a prompt cached."""

    worker: WorkerRecord
    num_pages: int


def choose_page_source(
    pair: Pair,
    keys: Sequence[PageKey],
    known: Mapping[Incarnation, int],
    workers: Mapping[Incarnation, WorkerRecord],
    index: CacheIndex,
    now: float,
) -> PageSourceChoice | None:
    """The source with the most of `keys`, those that prefill can match; of equal ones that with the fastest link.

    `known`: leading tokens that a worker has, whatever its events say.
    """
    best: tuple[int, float] | None = None
    choice = None
    for link in pair.prefill.links:
        worker = workers.get(link.prefill_incarnation)
        if worker is None or worker.id != link.prefill_id or worker.status is not WorkerStatus.READY:
            continue
        num_known = min(len(keys), known.get(worker.incarnation, 0) // worker.page_size)
        num_pages = max(num_known, index.num_confirmed_pages(worker.incarnation, keys))
        if best is None or (num_pages, link.bandwidth_bytes_per_s) > best:
            best, choice = (num_pages, link.bandwidth_bytes_per_s), PageSourceChoice(worker, num_pages)
    if choice is None or choice.num_pages < MIN_GAIN_PAGES:
        return None
    own = index.num_hit_pages(pair.prefill.incarnation, keys, now)
    return choice if choice.num_pages - own >= MIN_GAIN_PAGES else None
