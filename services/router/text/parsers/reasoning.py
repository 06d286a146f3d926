"""Reasoning between two markers, such as `<think>` and `</think>`, before the answer.

An answer thinks at its beginning or not at all: the prompt has opened the block, or the output begins with the opening
marker. Where a marker is a token of the vocabulary, only that token counts, as in constraints; otherwise its text does.
A closing marker without a block is dropped from the answer; text before it was shown, so it stays text.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.services.router.text.parsers.base import OutputParser, ParsedPiece, held_length

MAX_DROPPED_SPACE = 4
"""Characters of whitespace that are dropped between the reasoning and the answer."""

MAX_HELD_SPACE = 4096
"""Characters of whitespace after which an output begins with its answer."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers of reasoning. `signatures`: texts in chat templates of models that write it."""

    name: str
    opening: str
    closing: str
    signatures: tuple[str, ...]

    def start_after(self, prompt: str, continued: str | None) -> ReasoningStart:
        """How an output begins after `prompt`. `continued`: the message that it continues, None for a new one."""
        tail = prompt.rstrip()
        if continued is not None:
            _, opening, thought = continued.rpartition(self.opening)
            return ReasoningStart.OPEN if opening and self.closing not in thought else ReasoningStart.CLOSED
        if tail.endswith(self.opening):
            return ReasoningStart.OPEN
        return ReasoningStart.CLOSED if tail.endswith(self.closing) else ReasoningStart.POSSIBLE


class ReasoningStart(enum.Enum):
    """OPEN: the prompt has opened the block. CLOSED: it has ended it. POSSIBLE: the model may open it."""

    OPEN = "open"
    CLOSED = "closed"
    POSSIBLE = "possible"


class _State(enum.Enum):
    BEGINNING = enum.auto()
    REASONING = enum.auto()
    ENDED = enum.auto()
    ANSWER = enum.auto()


_STATES = {
    ReasoningStart.OPEN: _State.REASONING,
    ReasoningStart.CLOSED: _State.ANSWER,
    ReasoningStart.POSSIBLE: _State.BEGINNING,
}


class ReasoningParser:
    """Takes the reasoning off, and gives the rest to `answer`, the parser of text and calls."""

    def __init__(
        self,
        format: ReasoningFormat,
        start: ReasoningStart,
        answer: OutputParser,
        tokens: frozenset[str] = frozenset(),
        *,
        keep_space: bool = False,
    ) -> None:
        """`tokens`: the markers that are tokens. `keep_space`: the answer has a form, which whitespace is part of."""
        self._format = format
        self._state = _STATES[start]
        self._answer = answer
        self._opening = "" if format.opening in tokens else format.opening
        self._closing = "" if format.closing in tokens else format.closing
        self._max_dropped = 0 if keep_space else MAX_DROPPED_SPACE
        self._held = ""

    @property
    def is_done(self) -> bool:
        """True if nothing more is shown."""
        return self._answer.is_done

    @property
    def in_reasoning(self) -> bool:
        """True while what comes is reasoning."""
        return self._state is _State.REASONING

    @property
    def in_block(self) -> bool:
        """True while what comes may be part of a call."""
        return self._answer.in_block

    def push(self, piece: str) -> ParsedPiece:
        """See `OutputParser.push`."""
        self._held += piece
        found = ParsedPiece()
        if self._state is _State.BEGINNING:
            self._begin()
        if self._state is _State.REASONING:
            found = ParsedPiece(reasoning=self._read_reasoning())
        if self._state is _State.ENDED:
            self._drop_space()
        if self._state is _State.ANSWER and self._held:
            piece, self._held = self._held, ""
            return found + self._answer.push(piece)
        return found

    def push_marker(self, marker: str) -> ParsedPiece:
        """See `OutputParser.push_marker`."""
        if self._state is _State.BEGINNING and marker == self._format.opening:
            self._held, self._state = "", _State.REASONING
            return ParsedPiece()
        if self._state is _State.REASONING:
            held, self._held = self._held, ""
            if marker != self._format.closing:
                return ParsedPiece(reasoning=held + marker)
            self._state = _State.ENDED
            return ParsedPiece(reasoning=held)
        found = self._release()
        if marker == self._format.closing and not self._answer.in_block:
            return found
        return found + self._answer.push_marker(marker)

    def finish(self) -> ParsedPiece:
        """See `OutputParser.finish`."""
        if self._state is _State.REASONING:
            held, self._held = self._held, ""
            return ParsedPiece(reasoning=held) + self._answer.finish()
        return self._release() + self._answer.finish()

    def _release(self) -> ParsedPiece:
        """What was held back belongs to the answer; after the reasoning it is whitespace, and dropped."""
        held = "" if self._state is _State.ENDED else self._held
        self._held, self._state = "", _State.ANSWER
        return self._answer.push(held) if held else ParsedPiece()

    def _begin(self) -> None:
        """Decides whether the output begins with the opening marker, once enough of it is there."""
        begun = self._held.lstrip()
        if len(self._held) - len(begun) > MAX_HELD_SPACE:
            self._state = _State.ANSWER
        elif self._opening and begun.startswith(self._opening):
            self._held, self._state = begun.removeprefix(self._opening), _State.REASONING
        elif begun and not (self._opening and self._opening.startswith(begun)):
            self._state = _State.ANSWER

    def _read_reasoning(self) -> str:
        """Reasoning that is certain; what may be the beginning of a closing text is held back."""
        if not self._closing:
            shown, self._held = self._held, ""
            return shown
        shown, closing, rest = self._held.partition(self._closing)
        if closing:
            self._held, self._state = rest, _State.ENDED
            return shown
        cut = len(self._held) - held_length(self._held, self._closing)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _drop_space(self) -> None:
        rest = self._held.lstrip()
        if not rest and len(self._held) < self._max_dropped:
            return  # more may come
        num_dropped = min(len(self._held) - len(rest), self._max_dropped)
        self._held, self._state = self._held[num_dropped:], _State.ANSWER
