"""Which worker incarnations have which pages: confirmed by their cache events, or expected from what was routed. Pure.

Holders of a key are bits of an integer, so a key takes the same room for one worker as for sixty. A worker that is
forgotten, or whose content is replaced, leaves its bit behind; old bits are swept together, not one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.domain.ids import Incarnation, PageKey

MAX_KEYS = 1 << 20
EXPECTED_S = 10.0
"""Time within which a page that was routed to a worker is expected there, unless an event confirms it."""
MAX_OLD_BITS = 64


class CacheIndex:
    """Keeps the `max_keys` most recently used keys. Owned by one event loop; time is an argument."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._holders: OrderedDict[PageKey, int] = OrderedDict()
        self._bits: dict[Incarnation, int] = {}
        self._followed: set[Incarnation] = set()
        self._num_bits = 0  # given so far, since the last sweep
        self._expected: OrderedDict[tuple[Incarnation, PageKey], float] = OrderedDict()  # in the order of their end

    def __len__(self) -> int:
        return len(self._holders)

    def clear(self, worker: Incarnation) -> None:
        """The worker's confirmed content is empty."""
        self._bits.pop(worker, None)
        self._followed.discard(worker)
        if self._num_bits - len(self._bits) >= MAX_OLD_BITS:
            self._sweep()
        self._bits[worker] = 1 << self._num_bits
        self._num_bits += 1

    def follows(self, worker: Incarnation) -> bool:
        """True if the worker's content is known from its events: at least one has come since it was cleared."""
        return worker in self._followed

    def update(self, worker: Incarnation, stored: Iterable[PageKey], removed: Iterable[PageKey]) -> None:
        """Adds to, and takes from, the confirmed content of a worker that was cleared once."""
        bit = self._bits[worker]
        self._followed.add(worker)
        for key in removed:
            self._expected.pop((worker, key), None)
            holders = self._holders.get(key, 0) & ~bit
            if holders:
                self._holders[key] = holders
            else:
                self._holders.pop(key, None)
        for key in reversed(list(stored)):  # in order of their chains, whose roots are the last to be dropped
            self._expected.pop((worker, key), None)
            self._holders[key] = self._holders.pop(key, 0) | bit
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def expect(self, worker: Incarnation, keys: Iterable[PageKey], now: float) -> None:
        """Expects pages that were just routed to the worker, for `EXPECTED_S`."""
        self._expire(now)
        for key in keys:
            self._expected.pop((worker, key), None)
            self._expected[worker, key] = now + EXPECTED_S
        while len(self._expected) > self._max_keys:
            self._expected.popitem(last=False)

    def forget(self, worker: Incarnation) -> None:
        """The worker is gone."""
        self._bits.pop(worker, None)
        self._followed.discard(worker)
        for pair in [pair for pair in self._expected if pair[0] == worker]:
            del self._expected[pair]

    def num_hit_pages(self, worker: Incarnation, keys: Sequence[PageKey], now: float) -> int:
        """Counts the leading `keys` that the worker has or is expected to have."""
        self._expire(now)
        bit, num_pages = self._bits.get(worker, 0), 0
        for key in keys:
            if not self._holders.get(key, 0) & bit and (worker, key) not in self._expected:
                break
            num_pages += 1
        for key in reversed(keys[:num_pages]):  # the first page is the last to be dropped
            if key in self._holders:
                self._holders.move_to_end(key)
        return num_pages

    def num_confirmed_pages(self, worker: Incarnation, keys: Sequence[PageKey]) -> int:
        """Counts the leading `keys` that the worker's own events confirm."""
        bit = self._bits.get(worker, 0)
        return next((number for number, key in enumerate(keys) if not self._holders.get(key, 0) & bit), len(keys))

    def confirmed(self, worker: Incarnation) -> frozenset[PageKey]:
        """All pages that the worker's events confirm. Walks the index."""
        bit = self._bits.get(worker, 0)
        return frozenset(key for key, holders in self._holders.items() if holders & bit)

    def _expire(self, now: float) -> None:
        while self._expected:
            pair, until = next(iter(self._expected.items()))
            if until > now:
                return
            del self._expected[pair]

    def _sweep(self) -> None:
        """Gives the workers new bits from 0 and drops the keys that none of them has."""
        old = dict(self._bits)
        self._bits = {worker: 1 << number for number, worker in enumerate(old)}
        self._num_bits = len(self._bits)
        swept = ((key, self._renumber(holders, old)) for key, holders in self._holders.items())
        self._holders = OrderedDict((key, holders) for key, holders in swept if holders)

    def _renumber(self, holders: int, old: dict[Incarnation, int]) -> int:
        return sum(self._bits[worker] for worker, bit in old.items() if holders & bit)
