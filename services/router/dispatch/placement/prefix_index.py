"""Estimates of what workers have cached, from what was sent to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.domain.ids import Incarnation, PageKey
from baton.domain.worker import WorkerRecord

_NOBODY = frozenset[Incarnation]()


class PrefixIndex:
    """Estimates which worker incarnations hold which pages, from what was sent where.

    Workers evict pages without a message, so the index is a hint. It keeps the `max_keys` most recently used keys.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._holders: OrderedDict[PageKey, frozenset[Incarnation]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: Incarnation, keys: Sequence[PageKey]) -> None:
        """Records that `holder` has the pages of `keys`, which are in chain order."""
        for key in reversed(keys):  # the chain's root ends up the most recently used: it is the last to be forgotten
            held = self._holders.get(key)
            if held is not None:
                self._holders.move_to_end(key)
            if held is None or holder not in held:
                self._holders[key] = (held or _NOBODY) | {holder}
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def retain(self, alive: frozenset[Incarnation]) -> None:
        """Forgets every holder that is not in `alive`."""
        kept = ((key, holders & alive) for key, holders in self._holders.items())
        self._holders = OrderedDict((key, holders) for key, holders in kept if holders)

    def num_hit_pages(self, holder: Incarnation, keys: Iterable[PageKey]) -> int:
        """Counts the leading `keys` that `holder` probably has."""
        num_pages = 0
        for key in keys:
            if holder not in self._holders.get(key, ()):
                break
            num_pages += 1
        return num_pages

    def num_cached_pages(self, worker: WorkerRecord, keys: Sequence[PageKey]) -> int:
        """Counts the leading `keys` that `worker` probably has, by all that is known of it."""
        return self.num_hit_pages(worker.incarnation, keys)
