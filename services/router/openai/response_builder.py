"""The interface between tokens and the JSON of an endpoint. Implemented by `chat` and `completions`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UnsetType

from baton.domain.request import FinishReason, OutputToken
from baton.domain.scores.prompt_scores import PromptScores
from baton.services.router.openai.schemas import StopReason, Usage
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.text.choice_text import TokenEvent
from baton.services.router.text.parsers.base import ToolCall


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A complete choice. `stop`: index of the stop string that ended it."""

    index: int
    text: str
    tokens: tuple[OutputToken, ...]
    finish: FinishReason
    stop: int | None = None
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


def stop_reason(
    request: ValidRequest, eos: Collection[int], finish: FinishReason | None, stop: int | None, last: OutputToken | None
) -> StopReason:
    """The reason of a `STOP`: the stop string of this index, or the last token unless it is the model's own end."""
    if finish is not FinishReason.STOP:
        return None
    if stop is not None:
        return request.stop_strings[stop]
    return last.token if last is not None and last.token not in eos else None


class ResponseBuilder(Protocol):
    """Builds the JSON of one response. Gets every event of its request, from the first one on."""

    def use_scores(self, scores: Mapping[int, PromptScores]) -> None:
        """Sets where the scores of prompts are, by prompt. One that is missing is left out: the client has it."""
        ...

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> bytes:
        """JSON of one event of a streamed response."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """JSON of the extra event with `usage` and without choices."""
        ...

    def response(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """JSON of a response that is not streamed."""
        ...
