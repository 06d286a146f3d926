"""The parser of calls between text, for formats that differ in their blocks.

A block begins with a marker, or with a text that only the beginning of an answer may have. A `BlockReader` says where
it ends and which calls it holds. A block that is no call stays text, verbatim, so nothing that was shown is ever taken
back. Whitespace before a call is part of it. After a call its closing markers are dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.router.text.parsers.base import ParsedPiece, ToolCall, held_length
from services.router.text.parsers.json_spans import SPACE

MAX_CALL_CHARS = 64 * 1024
"""Of one block; a longer one is text."""


@dataclass(frozen=True, slots=True)
class FoundCalls:
    """A block that ended: index after it, and the names and arguments of its calls."""

    end: int
    calls: tuple[tuple[str, str], ...]


class BlockState(enum.Enum):
    """OPEN: the end is not there yet. REJECTED: this is no call, whatever follows."""

    OPEN = "open"
    REJECTED = "rejected"


class BlockReader(Protocol):
    """Reads one block, which is given from its beginning each time, and longer each time."""

    def read(self, text: str) -> FoundCalls | BlockState:
        """`text`: what follows the marker so far, or the block from its beginning. The answer for a text that has
        ended, or was rejected, is the same for every longer one."""
        ...


@dataclass(frozen=True, slots=True)
class BlockSyntax:
    """`openings`: markers of blocks. `head`: characters that a block without a marker may begin with, at the beginning
    of an answer, or after another one. `closings`: markers that may follow a call, in this order.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    head: str = ""


class BlockParser:
    """Holds back a marker that has begun, whitespace before one, and the block after it."""

    in_reasoning = False

    def __init__(
        self,
        syntax: BlockSyntax,
        reader: Callable[[], BlockReader],
        *,
        single: bool = False,
        calls_only: bool = False,
    ) -> None:
        """`reader`: makes the reader of a block. `single`: what comes after the first call is dropped; `calls_only`:
        text is, too, such as the beginning of a call that was cut.
        """
        self._syntax = syntax
        self._new_reader = reader
        self._single = single
        self._calls_only = calls_only
        self._held = ""
        self._opening = ""
        self._reader: BlockReader | None = None
        self._at_head = bool(syntax.head)
        self._num_closings = len(syntax.closings)  # that have passed; fewer: others may come
        self._num_calls = 0

    @property
    def is_done(self) -> bool:
        """True if nothing more is shown."""
        return self._single and self._num_calls > 0

    @property
    def in_block(self) -> bool:
        """True while what comes may be part of a call."""
        return self._reader is not None

    def push(self, piece: str) -> ParsedPiece:
        """See `OutputParser.push`."""
        text, calls = "", list[ToolCall]()
        self._held += piece
        while not self.is_done:
            if self._reader is None:
                shown, found = self._read_text()
                text += shown
                if not found:
                    break
            ended = self._read_block()
            if ended is None:
                break
            if isinstance(ended, str):
                text += ended
            else:
                calls += ended
        return ParsedPiece("" if self._calls_only else text, tuple(calls))

    def push_marker(self, marker: str) -> ParsedPiece:
        """See `OutputParser.push_marker`. Markers count as text, too: not every vocabulary has them."""
        return self.push(marker)

    def finish(self) -> ParsedPiece:
        """See `OutputParser.finish`. A block without an end is text; whitespace after a call is nothing."""
        rest = ("" if self._reader is None else self._opening) + self._held
        self._held, self._reader = "", None
        is_over = self.is_done or self._calls_only or (self._num_calls > 0 and not rest.strip(SPACE))
        return ParsedPiece() if is_over else ParsedPiece(rest)

    def _read_text(self) -> tuple[str, bool]:
        """Text before the next block, and True if the block has begun."""
        if not self._drop_closings():
            return "", False
        if self._at_head:
            rest = self._held.lstrip(SPACE)
            if not rest:
                return "", False
            self._at_head = False
            if rest[0] in self._syntax.head:
                self._begin(self._held[: -len(rest)] if len(rest) < len(self._held) else "", rest)
                return "", True
        found = [
            (at, -len(opening), opening) for opening in self._syntax.openings if (at := self._held.find(opening)) >= 0
        ]
        if not found:
            cut = len(self._held) - self._num_held(self._held)
            shown, self._held = self._held[:cut], self._held[cut:]
            return shown, False
        at, _, opening = min(found)
        shown = self._held[:at].rstrip(SPACE)
        self._begin(self._held[len(shown) : at + len(opening)], self._held[at + len(opening) :])
        return shown, True

    def _begin(self, opening: str, rest: str) -> None:
        self._opening, self._held, self._reader = opening, rest, self._new_reader()

    def _drop_closings(self) -> bool:
        """Drops closing markers after a call, and whitespace before them; False if more text is needed to tell."""
        closings = self._syntax.closings
        while self._num_closings < len(closings):
            rest, left = self._held.lstrip(SPACE), closings[self._num_closings :]
            met = next((index for index, closing in enumerate(left) if rest.startswith(closing)), None)
            if met is not None:
                self._held = rest.removeprefix(left[met])
                self._num_closings += met + 1
            elif any(closing.startswith(rest) for closing in left):
                return False
            else:
                self._num_closings = len(closings)
        return True

    def _read_block(self) -> list[ToolCall] | str | None:
        """The calls, or the block's opening if it has none; None: more is needed."""
        if self._reader is None:
            return None
        found = self._reader.read(self._held)
        if found is BlockState.OPEN and len(self._held) <= MAX_CALL_CHARS:
            return None
        self._reader = None
        if not isinstance(found, FoundCalls) or found.end > MAX_CALL_CHARS:
            return self._opening
        self._held, self._num_closings, self._at_head = self._held[found.end :], 0, bool(self._syntax.head)
        kept = found.calls[:1] if self._single else found.calls
        calls = [ToolCall(self._num_calls + index, *call) for index, call in enumerate(kept)]
        self._num_calls += len(calls)
        return calls

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix that may be whitespace before a marker, or its beginning."""
        size = max((held_length(text, opening) for opening in self._syntax.openings), default=0)
        rest = text[: len(text) - size]
        return size + len(rest) - len(rest.rstrip(SPACE))
