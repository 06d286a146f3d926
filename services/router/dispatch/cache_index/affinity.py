"""Remembers which workers had the requests of a `prompt_cache_key` last. Called by `reserve`; pure.

The page index knows only pages of finished prompts, and forgets. A client that sends a key says that its requests share
a prefix; `placement` sends them to the same workers while that costs little.
"""

from __future__ import annotations

from collections import OrderedDict

from baton.domain.ids import Incarnation

MAX_KEYS = 1 << 14


class KeyAffinity:
    """Keeps the workers of the `max_keys` most recently used keys. Owned by one event loop."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._last: OrderedDict[str, tuple[Incarnation, Incarnation]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def add(self, key: str, workers: tuple[Incarnation, Incarnation]) -> None:
        """Records the (prefill, decode) workers of a request with `key`; "" is no key."""
        if not key:
            return
        self._last[key] = workers
        self._last.move_to_end(key)
        if len(self._last) > self._max_keys:
            self._last.popitem(last=False)

    def find(self, key: str) -> tuple[Incarnation, Incarnation] | None:
        """The workers of the last request with `key`, gone ones too; None if there was none lately."""
        return self._last.get(key)
