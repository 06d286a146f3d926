"""Builds the responses of /v1/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from baton.domain.scores.prompt_scores import PromptScores
from baton.services.router.openai.logprobs import (
    TokenNamer,
    completion_logprobs,
    echoed_logprobs,
    join_logprobs,
    prompt_logprobs,
    token_ids,
)
from baton.services.router.openai.response_builder import FinishedChoice, stop_reason
from baton.services.router.openai.schemas import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.text.choice_text import TokenEvent
from baton.services.router.text.text_model import TextModel


class CompletionResponseBuilder:
    """Builds the response to one completion. An echo comes with the first token of its choice."""

    def __init__(self, request: ValidRequest, text: TextModel, fingerprint: str) -> None:
        self._request = request
        self._text = text
        self._namer = TokenNamer.of(text, request)
        self._fingerprint = fingerprint
        self._encode = msgspec.json.Encoder().encode
        # choice -> characters of the echo and of tokens with log probabilities so far
        self._offsets: dict[int, int] = {}
        self._scores: Mapping[int, PromptScores] = {}

    def use_scores(self, scores: Mapping[int, PromptScores]) -> None:
        """See `ResponseBuilder.use_scores`."""
        self._scores = scores

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> bytes:
        """One token."""
        request, token = self._request, event.token
        is_first = event.choice not in self._offsets
        echo = request.echoes[event.choice] if is_first else ""
        offset = self._offsets.get(event.choice, len(echo))
        logprobs = None
        if token is not None and token.logprobs is not None:
            logprobs = completion_logprobs(self._namer, [token], offset)
            self._offsets[event.choice] = offset + len(self._text.token_text(token.token))
        else:
            self._offsets[event.choice] = offset
        if is_first:
            logprobs = join_logprobs(self._echoed(event.choice), logprobs)
        choice = CompletionChoice(
            event.choice,
            echo + event.text,
            logprobs,
            None if event.finish is None else event.finish._value_,  # `value` is two Python calls
            UNSET if not request.return_token_ids else [] if token is None else [token.token],
            UNSET
            if event.finish is None
            else stop_reason(request, self._text.eos_token_ids, event.finish, event.stop, token),
            self._prompt_ids(event.choice) if is_first else UNSET,
            self._listed(event.choice) if is_first else UNSET,
        )
        return self._completion([choice], usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        """The extra chunk with usage and without choices."""
        return self._completion([], usage)

    def response(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response."""
        return self._completion([self._choice(choice) for choice in choices], usage)

    def _choice(self, choice: FinishedChoice) -> CompletionChoice:
        echo = self._request.echoes[choice.index]
        answer = completion_logprobs(self._namer, choice.tokens, len(echo))
        logprobs = join_logprobs(self._echoed(choice.index), answer)
        ids = token_ids(self._request.return_token_ids, choice.tokens)
        last = choice.tokens[-1] if choice.tokens else None
        reason = stop_reason(self._request, self._text.eos_token_ids, choice.finish, choice.stop, last)
        prompt = self._prompt_ids(choice.index)
        listed, text = self._listed(choice.index), echo + choice.text
        return CompletionChoice(choice.index, text, logprobs, choice.finish.value, ids, reason, prompt, listed)

    def _echoed(self, choice: int) -> CompletionLogprobs | None:
        """The log probabilities of an echo."""
        request, prompt = self._request, choice // self._request.num_choices
        scores = self._scores.get(prompt)
        if request.scores is None or request.scores.echoed is None or scores is None:
            return None
        echo, k = request.echoes[choice], request.scores.echoed
        return echoed_logprobs(self._namer, request.prompts[prompt], echo, scores, k)

    def _listed(self, choice: int) -> PromptLogprobs | UnsetType:
        """The `prompt_logprobs` of a choice."""
        request, prompt = self._request, choice // self._request.num_choices
        scores = self._scores.get(prompt)
        if request.scores is None or request.scores.listed is None or scores is None:
            return UNSET
        return prompt_logprobs(self._text, request.prompts[prompt], scores, request.scores.listed)

    def _prompt_ids(self, choice: int) -> list[int] | UnsetType:
        """The prompt of a choice, with `return_token_ids`."""
        request = self._request
        return list(request.prompts[choice // request.num_choices]) if request.return_token_ids else UNSET

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return self._encode(
            Completion(
                id=self._request.id,
                created=self._request.created_s,
                model=self._request.model,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage,
            )
        )
