"""Finds stop strings in text that arrives in pieces. Holds back no more text than the longest one needs.

`ChoiceText` owns one matcher a sequence. It sees text only; tokens and finish reasons are not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReleasedText:
    """Text that may be shown now. `stop`: index of the stop string that was met; no more text comes."""

    text: str
    stop: int | None = None


class StopMatcher:
    """The stop string that ends first wins, and the longest of those that end together. So piece boundaries do not
    matter."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops`: non-empty strings. Without any, all text passes at once. `include`: the text ends with the stop."""
        self._stops = tuple(stops)
        self._include = include
        self._prefixes = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._max_held_chars = max((len(stop) - 1 for stop in stops), default=0)
        self._held = ""

    def push(self, piece: str) -> ReleasedText:
        """Adds the next piece of text."""
        if not self._stops:
            return ReleasedText(piece)
        text = self._held + piece
        found = [
            (start + len(stop), start, index)
            for index, stop in enumerate(self._stops)
            if (start := text.find(stop)) >= 0
        ]
        if found:
            self._held = ""
            end, start, index = min(found)
            return ReleasedText(text[: end if self._include else start], index)
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return ReleasedText(text[:cut])

    def finish(self) -> str:
        """Returns the text held back for a stop that did not come."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop."""
        for size in range(min(len(text), self._max_held_chars), 0, -1):
            if text[-size:] in self._prefixes:
                return size
        return 0
