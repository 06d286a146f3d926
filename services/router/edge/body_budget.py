"""Bounds the memory of all bodies that are being read and parsed. Owned by `routes`.

A body counts from the arrival of its bytes until its request is parsed. Then the admission queue bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.domain.errors import Overloaded

RETRY_AFTER_S = 1.0

CountBytes = Callable[[int], None]
"""Counts bytes that arrived. Raises `Overloaded` when the budget is exhausted."""


class BodyBudget:
    """At most `max_bytes` for all bodies together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._num_bytes

    @contextmanager
    def track(self) -> Iterator[CountBytes]:
        """Counts one body; its bytes are released at the end of the block."""
        held = 0

        def count_bytes(num_bytes: int) -> None:
            nonlocal held
            if self._num_bytes + num_bytes > self._max_bytes:
                raise Overloaded("too many bodies are being read", retry_after_s=RETRY_AFTER_S)
            self._num_bytes += num_bytes
            held += num_bytes

        try:
            yield count_bytes
        finally:
            self._num_bytes -= held
