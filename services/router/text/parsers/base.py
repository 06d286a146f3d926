"""What a parser of model output is, and what it finds. Pure; depends on the text of the tokens only.

So a resumed or taken-over answer, whose text is read again from its first token, gives the same events.
"""

from __future__ import annotations

import hashlib
from base64 import b32encode
from dataclasses import dataclass
from typing import Protocol

CALL_ID_BYTES = 15


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. `index` counts the calls of a choice; `arguments`: JSON, as the model wrote it."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedPiece:
    """What became certain: text, then calls. The text of accepted calls is in neither."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class OutputParser(Protocol):
    """State of one choice."""

    @property
    def is_done(self) -> bool:
        """True if nothing more is shown: the choice ends."""
        ...

    def push(self, piece: str) -> ParsedPiece:
        """Adds the next piece of the model's text."""
        ...

    def finish(self) -> ParsedPiece:
        """Releases what was held back: the model writes no more."""
        ...


def call_id(request_id: str, choice: int, index: int) -> str:
    """The id of a call: the same in every run of the request."""
    digest = hashlib.blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=CALL_ID_BYTES).digest()
    return f"call_{b32encode(digest).decode().lower()}"
