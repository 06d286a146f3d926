"""The answers of /v1/completions, whole and in parts. `reader` makes one shape a call; `delivery` fills it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UnsetType

from services.router.api.calls import ValidCompletion
from services.router.api.logprobs import completion_logprobs, token_ids
from services.router.api.schemas import Completion, CompletionChoice, Usage
from services.router.api.shape import WholeChoice
from services.router.text.choice_text import TokenEvent
from services.router.text.model import TextModel


class CompletionShape:
    """One completion's answer. An echo comes with its choice's first token, never before it."""

    def __init__(self, call: ValidCompletion, text: TextModel, fingerprint: str) -> None:
        self._call = call
        self._text = text
        self._fingerprint = fingerprint
        # choice -> characters of the echo and of the tokens with log probabilities given so far
        self._offsets: dict[int, int] = {}

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> Completion:
        """One token."""
        echo = "" if event.choice in self._offsets else self._call.echoes[event.choice]
        offset = self._offsets.get(event.choice, len(echo))
        tokens = [event.token] if event.token is not None else []
        self._offsets[event.choice] = offset + sum(len(self._text.token_text(t.token)) for t in tokens if t.logprobs)
        choice = CompletionChoice(
            index=event.choice,
            text=echo + event.text,
            logprobs=completion_logprobs(self._text, tokens, offset),
            finish_reason=event.finish.value if event.finish is not None else None,
            token_ids=token_ids(self._call.return_token_ids, tokens),
        )
        return self._completion([choice], usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """The extra chunk without choices."""
        return self._completion([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Completion:
        """All choices at once."""
        return self._completion([self._whole_choice(choice) for choice in choices], usage)

    def _whole_choice(self, choice: WholeChoice) -> CompletionChoice:
        echo = self._call.echoes[choice.index]
        logprobs = completion_logprobs(self._text, choice.tokens, len(echo))
        ids = token_ids(self._call.return_token_ids, choice.tokens)
        return CompletionChoice(choice.index, echo + choice.text, logprobs, choice.finish.value, ids)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self._call.id,
            created=self._call.created_s,
            model=self._call.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )
