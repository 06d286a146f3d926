"""The interface between tokens and the JSON of an endpoint. Implemented by `chat` and `completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UnsetType

from baton.domain.request import FinishReason, OutputToken
from services.router.openai.schemas import Usage
from services.router.text.choice_text import TokenEvent


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A complete choice."""

    index: int
    text: str
    tokens: tuple[OutputToken, ...]
    finish: FinishReason


class ResponseBuilder(Protocol):
    """Builds the JSON of one response. Gets every event of its request, from the first one on."""

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> bytes:
        """JSON of one event of a streamed response."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """JSON of the extra event with `usage` and without choices."""
        ...

    def response(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """JSON of a response that is not streamed."""
        ...
