"""The streams of one end of a session, by number. Pure.

The dialler draws numbers upwards from 1, and none twice. A message of a stream that is not open is late: its attempt
has ended here. A handler is whatever the owner keeps for a stream.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.domain.errors import LinkBroken

MAX_STREAM = 0xFFFFFFFF
UNLISTED_GRACE_S = 1.0
"""A stream that is not in the dialler's list may have been opened since; older ones are ended."""

Handler = TypeVar("Handler")


@dataclass(frozen=True, slots=True)
class ReconciledStreams(Generic[Handler]):
    """What a reconciliation has found: numbers that are not open here, and streams that the other end does not list."""

    unknown: tuple[int, ...]
    unlisted: tuple[tuple[int, Handler], ...]


class StreamTable(Generic[Handler]):
    """Open streams of one end."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}  # of the open streams by number, oldest first; read it for each row
        self._opened_at: dict[int, float] = {}
        self._newest = 0

    def __len__(self) -> int:
        return len(self.handlers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Open streams, oldest first."""
        return tuple(self.handlers)

    def draw(self, handler: Handler, now: float) -> int:
        """Opens the dialler's next stream. Raises `LinkBroken` when all numbers were used: another session has them."""
        number = self._newest + 1
        if number > MAX_STREAM:
            raise LinkBroken("the session has no stream numbers left")
        self._newest = number
        self.handlers[number], self._opened_at[number] = handler, now
        return number

    def accept(self, number: int, handler: Handler, now: float) -> int:
        """Opens the listener's end of a stream. Raises `LinkBroken` for a number that was used before."""
        if not self._newest < number <= MAX_STREAM:
            raise LinkBroken(f"stream {number} was opened after stream {self._newest}")
        self._newest = number
        self.handlers[number], self._opened_at[number] = handler, now
        return number

    def get(self, number: int) -> Handler | None:
        """The stream's handler; None for a late message."""
        return self.handlers.get(number)

    def close(self, number: int) -> Handler | None:
        """Ends a stream here; None if it has ended before."""
        self._opened_at.pop(number, None)
        return self.handlers.pop(number, None)

    def close_all(self) -> list[Handler]:
        """Ends all streams: the session is lost."""
        handlers = list(self.handlers.values())
        self.handlers.clear()
        self._opened_at.clear()
        return handlers

    def compare(self, listed: Collection[int], now: float) -> ReconciledStreams[Handler]:
        """Compares with the other end's open streams. Both ends agree unless one of them has a bug."""
        numbers = frozenset(listed)
        unlisted = [
            (number, self.handlers[number])
            for number, opened_at in self._opened_at.items()
            if number not in numbers and now - opened_at >= UNLISTED_GRACE_S
        ]
        return ReconciledStreams(tuple(sorted(numbers - self.handlers.keys())), tuple(unlisted))
