"""Counts the requests that have a slot and that prefill does not have yet. Owned by `AdmissionController`; pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.ids import RequestId

MAX_AGE_S = 0.1
"""A request that has had its slot for longer waits for room: it is not about to be sent."""


class ComingPrompts:
    """Requests by the time at which they were granted their slots, the oldest first.

    Choices of one prompt count once: the others are sent when the first one has its first token.
    """

    def __init__(self) -> None:
        self._granted: dict[RequestId, tuple[float, int]] = {}
        self._prompts: set[int] = set()  # identities of objects that the requests keep

    def add(self, id: RequestId, prompt: Sequence[int], now: float) -> None:
        """A request was granted its slot. `prompt`: the same object for all choices of it."""
        if _identity(prompt) not in self._prompts:
            self._prompts.add(_identity(prompt))
            self._granted[id] = now, _identity(prompt)

    def discard(self, id: RequestId) -> None:
        """Prefill has the request, or it ended. Idempotent."""
        granted = self._granted.pop(id, None)
        if granted is not None:
            self._prompts.discard(granted[1])

    def count(self, now: float) -> int:
        """Requests that were granted their slots within `MAX_AGE_S`."""
        while self._granted:
            id, (granted_at, _) = next(iter(self._granted.items()))
            if now - granted_at <= MAX_AGE_S:
                break
            self.discard(id)
        return len(self._granted)


_identity = id
