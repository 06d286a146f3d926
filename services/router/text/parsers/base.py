"""What a parser of model output is, and what it finds. Pure; depends on the text of the tokens only.

So a resumed or taken-over answer, whose text is read again from its first token, gives the same events.
"""

from __future__ import annotations

import hashlib
from base64 import b32encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

CALL_ID_BYTES = 15
SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, or a part of it. `index` counts the calls of a choice; `arguments`: JSON, as the model wrote it.

    The first part has the name; a further one has an empty name, and more of the arguments.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedPiece:
    """What became certain: reasoning, text, then calls. The text of accepted calls is in none of them."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    def __add__(self, later: ParsedPiece) -> ParsedPiece:
        return ParsedPiece(self.text + later.text, self.calls + later.calls, self.reasoning + later.reasoning)


def joined_calls(parts: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls that these parts, in their order, make."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        names.setdefault(part.index, part.name)
        arguments.setdefault(part.index, []).append(part.arguments)
    return tuple(ToolCall(index, name, "".join(arguments[index])) for index, name in names.items())


class OutputParser(Protocol):
    """State of one choice."""

    @property
    def is_done(self) -> bool:
        """True if nothing more is shown: the choice ends."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """True while what comes is reasoning."""
        ...

    @property
    def in_block(self) -> bool:
        """True while what comes may be part of a call."""
        ...

    def push(self, piece: str) -> ParsedPiece:
        """Adds the next piece of the model's text."""
        ...

    def push_marker(self, marker: str) -> ParsedPiece:
        """Adds a token that is a marker of the format. Text that only looks like it comes by `push`."""
        ...

    def finish(self) -> ParsedPiece:
        """Releases what was held back: the model writes no more."""
        ...


class TextParser:
    """The parser of an answer that is text and nothing else."""

    is_done = in_reasoning = in_block = False

    def push(self, piece: str) -> ParsedPiece:
        """See `OutputParser.push`."""
        return ParsedPiece(piece)

    def push_marker(self, marker: str) -> ParsedPiece:
        """See `OutputParser.push_marker`."""
        return ParsedPiece(marker)

    def finish(self) -> ParsedPiece:
        """See `OutputParser.finish`."""
        return ParsedPiece()


@dataclass(frozen=True, slots=True)
class AnswerParser:
    """The parser of one choice, and the tokens that are markers of its format: id -> text."""

    parser: OutputParser
    markers: Mapping[int, str] = field(default_factory=dict)


def call_id(request_id: str, choice: int, index: int, *, is_short: bool = False) -> str:
    """The id of a call: the same in every run of the request. `is_short`: 9 letters and digits, as Mistral demands."""
    digest = hashlib.blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=CALL_ID_BYTES).digest()
    text = b32encode(digest).decode().lower()
    return text[:SHORT_ID_CHARS] if is_short else f"call_{text}"


def held_length(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that may be the beginning of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
