"""What turns tokens and text into the JSON of an endpoint. `chat` and `completions` are the two shapes; values here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct, UnsetType

from baton.domain.request import FinishReason, OutputToken
from services.router.openai.schemas import Usage
from services.router.text.choice_text import TokenEvent


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A choice that has ended."""

    index: int
    text: str
    tokens: tuple[OutputToken, ...]
    finish: FinishReason


class ResponseBuilder(Protocol):
    """Puts tokens and text into the JSON of one endpoint. One a request: it sees every event, from the first one on."""

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> Struct:
        """One event of a streamed answer."""
        ...

    def usage_chunk(self, usage: Usage) -> Struct:
        """The extra event with `usage` and no choices."""
        ...

    def response(self, choices: Sequence[FinishedChoice], usage: Usage) -> Struct:
        """An answer that is not streamed."""
        ...
