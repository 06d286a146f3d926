"""What placement knows of each worker's cache: its own events where it sends them, else what was routed to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from baton.domain.ids import Incarnation, PageKey
from baton.domain.worker import LOWER_TIER, WorkerRecord
from baton.services.router.dispatch.cache_index.index import CacheIndex
from baton.services.router.dispatch.placement.prefix_index import PrefixIndex


class KnownPages(PrefixIndex):
    """A `PrefixIndex` that asks the cache events first.

    Of a worker that is followed, evicted pages do not count. Pages that were routed to it count for a while before its
    events confirm them. Of other workers (older versions, or before their first event) all routed pages count.
    """

    def __init__(self, max_keys: int, index: CacheIndex, clock: Callable[[], float]) -> None:
        super().__init__(max_keys)
        self._index = index
        self._now = clock

    def num_hit_pages(self, holder: Incarnation, keys: Iterable[PageKey]) -> int:
        """Counts the leading `keys` that `holder` has, or probably has."""
        if self._index.follows(holder):
            return self._index.num_hit_pages(holder, tuple(keys), self._now())
        return super().num_hit_pages(holder, keys)

    def num_cached_pages(self, worker: WorkerRecord, keys: Sequence[PageKey]) -> int:
        """Counts the leading `keys` that `worker` has, or probably has, in its pool or a lower tier without events."""
        num_pages = self.num_hit_pages(worker.incarnation, keys)
        if LOWER_TIER not in worker.capabilities or num_pages == len(keys):
            return num_pages
        return max(num_pages, super().num_hit_pages(worker.incarnation, keys))

    def predict_tokens(self, worker: WorkerRecord, num_tokens: int, keys: Sequence[PageKey]) -> int:
        """Prompt tokens that the worker will find cached by its events, without the last, which is computed always.

        From then on the pages are expected there.
        """
        now, matchable = self._now(), keys[: max(0, num_tokens - 1) // worker.page_size]
        num_pages = self._index.num_hit_pages(worker.incarnation, matchable, now)
        self._index.expect(worker.incarnation, keys, now)
        return num_pages * worker.page_size

    def num_hit_tokens(self, worker: WorkerRecord, keys: Mapping[int, Sequence[PageKey]]) -> int:
        """Leading tokens of a query that a worker has, or probably has. `keys`: see `PlacementQuery`."""
        return worker.page_size * self.num_cached_pages(worker, keys.get(worker.page_size, ()))
