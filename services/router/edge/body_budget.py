"""Bounds the memory of all bodies that are being read and parsed. Owned by `routes`.

A body counts from the arrival of its bytes until its request is parsed. Then the admission queue bounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

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

    def track(self) -> AbstractContextManager[CountBytes]:
        """Counts one body; its bytes are released at the end of the block."""
        return _HeldBody(self)

    def hold(self, num_bytes: int) -> None:
        """Takes bytes of the budget. Raises `Overloaded` when it is exhausted."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise Overloaded("too many bodies are being read", retry_after_s=RETRY_AFTER_S)
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Gives bytes back."""
        self._num_bytes -= num_bytes


class _HeldBody:
    """The bytes of one body. No generator: each request has one."""

    __slots__ = ("_budget", "_num_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def __enter__(self) -> CountBytes:
        return self._count

    def __exit__(self, *_: object) -> None:
        self._budget.release(self._num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._budget.hold(num_bytes)
        self._num_bytes += num_bytes
