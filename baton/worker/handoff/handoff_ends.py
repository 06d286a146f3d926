"""The ends of handoffs, for watchers that come later. Owned by `handoff_log`; pure.

The newest ends are kept whole. Of older ones only a hash of the attempt is kept, so that many can be: their watchers
are told that the handoff has ended, not why. Of the rest only the latest end time is kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from baton.domain.errors import BatonError, LeaseEnded
from baton.domain.ids import AttemptId

MAX_WHOLE = 4096
"""Ends that are kept with their error, about 0.5 KiB each."""
MAX_HASHED = 1 << 15
"""Further ends of which a hash of 64 bits is kept, about 100 bytes each. Two of 2**15 attempts have the same one with a
probability of 3e-11."""


class HandoffEnds:
    """Ends by attempt. An attempt never begins twice, so an end stays true. Times in seconds, of any one clock."""

    def __init__(self, max_whole: int = MAX_WHOLE, max_hashed: int = MAX_HASHED) -> None:
        self._max_whole, self._max_hashed = max_whole, max_hashed
        self._whole: OrderedDict[AttemptId, tuple[BatonError, float]] = OrderedDict()
        self._order: deque[tuple[int, float]] = deque()
        self._hashes: set[int] = set()
        self._forgotten_at = -math.inf

    def remember(self, id: AttemptId, end: BatonError, now: float) -> None:
        """Remembers the first end of `id`."""
        end.__context__ = end.__cause__ = None  # with their frames they would keep the prompt
        self._whole.setdefault(id, (end.with_traceback(None), now))
        while len(self._whole) > self._max_whole:
            older, (_, ended_at) = self._whole.popitem(last=False)
            self._order.append((hash(older), ended_at))
            self._hashes.add(hash(older))
        while len(self._order) > self._max_hashed:
            hashed, self._forgotten_at = self._order.popleft()
            self._hashes.discard(hashed)

    def find(self, id: AttemptId) -> BatonError | None:
        """The end of `id`; None if it has not ended, or is forgotten."""
        if (found := self._whole.get(id)) is not None:
            return found[0]
        return LeaseEnded(f"{id}: the handoff has ended") if hash(id) in self._hashes else None

    def has_forgotten(self, since: float) -> bool:
        """True if a handoff that ended after `since` is forgotten."""
        return self._forgotten_at > since
