"""Names the worker whose cached pages of a prompt a prefill worker may import. Called by `workers`; pure.

A source is linked to the prefill worker, takes requests, and its own events confirm at least `MIN_GAIN_PAGES` more
leading pages than prefill has or is expected to have. The decode worker of the pair has told the length of its prefix
with the reservation. The prefill worker decides whether importing is cheaper than computing: it measures both.
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
    decode_prefix_len: int,
    workers: Mapping[Incarnation, WorkerRecord],
    index: CacheIndex,
    now: float,
) -> PageSourceChoice | None:
    """The source with the most of `keys`, those that prefill can match; of equal ones that with the fastest link."""
    best: tuple[int, float] | None = None
    choice = None
    for link in pair.prefill.links:
        worker = workers.get(link.prefill_incarnation)
        if worker is None or worker.id != link.prefill_id or worker.status is not WorkerStatus.READY:
            continue
        num_pages = index.num_confirmed_pages(worker.incarnation, keys)
        if worker.incarnation == pair.decode.incarnation:
            num_pages = max(num_pages, min(len(keys), decode_prefix_len // worker.page_size))
        if best is None or (num_pages, link.bandwidth_bytes_per_s) > best:
            best, choice = (num_pages, link.bandwidth_bytes_per_s), PageSourceChoice(worker, num_pages)
    if choice is None or choice.num_pages < MIN_GAIN_PAGES:
        return None
    own = index.num_hit_pages(pair.prefill.incarnation, keys, now)
    return choice if choice.num_pages - own >= MIN_GAIN_PAGES else None
