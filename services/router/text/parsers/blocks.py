"""The parser of calls between text, for formats that differ in their blocks.

A block begins with a marker, or with a text that only the beginning of an answer may have. A `BlockReader` says where
it ends and which calls it holds. A block that is no call stays text, verbatim, so nothing that was shown is ever taken
back: a call is shown when it is whole, or, if a constraint keeps it to its format, while it is written. Whitespace
before a call is part of it. After a call its closing markers are dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.services.router.text.parsers.argument_stream import ArgumentStream, BegunCall, ConstrainedCalls
from baton.services.router.text.parsers.base import ParsedPiece, ToolCall, held_length
from baton.services.router.text.parsers.json_spans import SPACE

MAX_CALL_CHARS = 64 * 1024
"""Of one block that may be no call; a longer one is text."""


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

    def begun(self, text: str) -> BegunCall | None:
        """The call whose arguments begin in the same text, if they are JSON; the same for every longer one."""
        ...


@dataclass(frozen=True, slots=True)
class BlockSyntax:
    """`openings`: markers of blocks. `head`: characters that a block without a marker may begin with, at the beginning
    of an answer, or after another one. `closings`: markers that may follow a call, in this order. A constraint that
    leaves text free begins after the first of `openings`.
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
        reader: Callable[[bool], BlockReader],
        *,
        single: bool = False,
        calls_only: bool = False,
        constrained: ConstrainedCalls = ConstrainedCalls.NONE,
    ) -> None:
        """`reader`: makes the reader of a block; True for one that a constraint keeps to its format. `single`: what
        comes after the first call is dropped; `calls_only`: text is, too, such as the beginning of a call that was cut.
        `constrained`: calls to show while they are written.
        """
        self._syntax = syntax
        self._new_reader = reader
        self._single = single
        self._calls_only = calls_only
        self._constrained = constrained
        self._held = ""
        self._opening = ""
        self._reader: BlockReader | None = None
        self._stream: ArgumentStream | None = None
        self._is_certain = False  # the block: it cannot turn out to be no call
        self._in_list = False  # the block is the rest of a list, whose bracket stands for a comma
        self._at_head = bool(syntax.head)
        self._num_closings = len(syntax.closings)  # that have passed; fewer: others may come
        self._num_calls = 0

    @property
    def is_done(self) -> bool:
        """True if nothing more is shown."""
        return self._single and self._num_calls > 0 and self._stream is None

    @property
    def in_block(self) -> bool:
        """True while what comes may be part of a call."""
        return self._reader is not None or self._stream is not None

    def push(self, piece: str) -> ParsedPiece:
        """See `OutputParser.push`."""
        self._held += piece
        return self._read("")

    def push_marker(self, marker: str) -> ParsedPiece:
        """See `OutputParser.push_marker`. Markers count as text, too: not every vocabulary has them."""
        self._held += marker
        return self._read(marker)

    def _read(self, token: str) -> ParsedPiece:
        """Reads what is held. `token`: its end, if that is a marker which came as one token."""
        text, calls = "", list[ToolCall]()
        while not self.is_done:
            if not self.in_block:
                shown, found = self._read_text(token)
                text += shown
                if not found:
                    break
            name = self._begin_stream()
            if self._stream is not None:
                part, has_ended = self._read_arguments(self._stream, name)
                calls += part
                if has_ended:
                    continue
                break
            ended = self._read_block()
            if ended is None:
                break
            if isinstance(ended, str):
                text += ended
            else:
                calls += ended
        return ParsedPiece("" if self._calls_only else text, tuple(calls))

    def finish(self) -> ParsedPiece:
        """See `OutputParser.finish`. A block without an end is text, unless its call is shown already; whitespace after
        a call is nothing.
        """
        rest = "" if self._in_list else ("" if self._reader is None else self._opening) + self._held
        self._held, self._reader = "", None
        is_over = self.is_done or self._calls_only or (self._num_calls > 0 and not rest.strip(SPACE))
        return ParsedPiece() if is_over else ParsedPiece(rest)

    def _read_text(self, token: str) -> tuple[str, bool]:
        """Text before the next block, and True if the block has begun."""
        if not self._drop_closings():
            return "", False
        if self._at_head:
            rest = self._held.lstrip(SPACE)
            if not rest:
                return "", False
            self._at_head = False
            if rest[0] in self._syntax.head:
                self._is_certain = self._constrained is ConstrainedCalls.ALL
                self._begin(self._held[: -len(rest)] if len(rest) < len(self._held) else "", rest)
                return "", True
        found = [
            (at, -len(opening), opening) for opening in self._syntax.openings if (at := self._held.find(opening)) >= 0
        ]
        if not found:
            cut = len(self._held) - self._num_held(self._held)
            shown, self._held = self._held[:cut], self._held[cut:]
            self._is_certain = self._is_certain and not shown
            return shown, False
        at, _, opening = min(found)
        shown = self._held[:at].rstrip(SPACE)
        is_token = opening == token and at + len(opening) == len(self._held)
        goes_on = self._is_certain and not shown
        self._is_certain = self._constrained is ConstrainedCalls.ALL or (
            self._constrained is ConstrainedCalls.AFTER_MARKER
            and is_token
            and (goes_on or opening == self._syntax.openings[0])
        )
        self._begin(self._held[len(shown) : at + len(opening)], self._held[at + len(opening) :])
        return shown, True

    def _begin(self, opening: str, rest: str) -> None:
        self._opening, self._held, self._reader = opening, rest, self._new_reader(self._is_certain)

    def _drop_closings(self) -> bool:
        """Drops closing markers after a call, and whitespace before them; False if more text is needed to tell."""
        closings = self._syntax.closings
        while self._num_closings < len(closings):
            rest, left = self._held.lstrip(SPACE), closings[self._num_closings :]
            met = next((index for index, closing in enumerate(left) if rest.startswith(closing)), None)
            if met is not None:
                self._held = rest.removeprefix(left[met])
                self._num_closings += met + 1
                self._is_certain = self._is_certain and self._num_closings < len(closings)
            elif any(closing.startswith(rest) for closing in left):
                return False
            else:
                self._num_closings = len(closings)
        return True

    def _begin_stream(self) -> str:
        """Goes over to a stream of arguments where those of a certain call have begun; its name, or ""."""
        begun = self._reader.begun(self._held) if self._reader is not None and self._is_certain else None
        if begun is None:
            return ""
        self._held, self._reader, self._stream = self._held[begun.at :], None, ArgumentStream(begun)
        self._num_calls += 1
        return begun.name

    def _read_arguments(self, stream: ArgumentStream, name: str) -> tuple[list[ToolCall], bool]:
        """The next part of a call, if there is one, and True if the call has ended. `name`: for its first part."""
        part = stream.push(self._held)
        self._held = part.rest or ""
        if part.rest is not None:
            self._stream, self._in_list = None, part.has_more
            self._end_block()
            if part.has_more:
                self._begin("", self._held)
        return [ToolCall(self._num_calls - 1, name, part.text)] if part.text else [], part.rest is not None

    def _read_block(self) -> list[ToolCall] | str | None:
        """The calls, or the block's opening if it has none; None: more is needed."""
        if self._reader is None:
            return None
        found = self._reader.read(self._held)
        if found is BlockState.OPEN and (self._is_certain or len(self._held) <= MAX_CALL_CHARS):
            return None
        self._reader = None
        in_list, self._in_list = self._in_list, False
        if not isinstance(found, FoundCalls) or (found.end > MAX_CALL_CHARS and not self._is_certain):
            if in_list:
                self._held = f",{self._held[1:]}"  # its bracket was a comma
            return self._opening
        self._held = self._held[found.end :]
        self._end_block()
        kept = found.calls[:1] if self._single else found.calls
        calls = [ToolCall(self._num_calls + index, *call) for index, call in enumerate(kept)]
        self._num_calls += len(calls)
        return calls

    def _end_block(self) -> None:
        self._num_closings, self._at_head = 0, bool(self._syntax.head)

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix that may be whitespace before a marker, or its beginning."""
        size = max((held_length(text, opening) for opening in self._syntax.openings), default=0)
        rest = text[: len(text) - size]
        return size + len(rest) - len(rest.rstrip(SPACE))
