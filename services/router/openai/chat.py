"""Builds the responses of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.router.openai.logprobs import chat_logprobs, token_ids
from services.router.openai.response_builder import FinishedChoice, stop_reason
from services.router.openai.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    Usage,
)
from services.router.openai.valid_request import ValidRequest
from services.router.text.choice_text import TokenEvent
from services.router.text.text_model import TextModel


class ChatResponseBuilder:
    """Builds the response to one chat."""

    def __init__(self, request: ValidRequest, text: TextModel, fingerprint: str) -> None:
        self._request = request
        self._text = text
        self._fingerprint = fingerprint
        self._encode = msgspec.json.Encoder().encode
        self._role_sent: set[int] = set()  # choices whose role is sent

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> bytes:
        """One token. The first chunk of a choice names the role."""
        request, is_first = self._request, not self._role_sent
        role: Literal["assistant"] | UnsetType = UNSET
        if event.choice not in self._role_sent:
            self._role_sent.add(event.choice)
            role = "assistant"
        token = event.token
        choice = ChatChunkChoice(
            event.choice,
            ChatDelta(event.text, role),
            None if token is None or token.logprobs is None else chat_logprobs(self._text, [token]),
            None if event.finish is None else event.finish.value,
            UNSET if not request.return_token_ids else [] if token is None else [token.token],
            UNSET
            if event.finish is None
            else stop_reason(request, self._text.eos_token_ids, event.finish, event.stop, token),
        )
        prompt = list(request.prompts[0]) if is_first and request.return_token_ids else UNSET
        return self._encode(
            ChatCompletionChunk(
                id=request.id,
                created=request.created_s,
                model=request.model,
                system_fingerprint=self._fingerprint,
                choices=[choice],
                usage=usage,
                prompt_token_ids=prompt,
            )
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """The extra chunk with usage and without choices."""
        request = self._request
        return self._encode(
            ChatCompletionChunk(
                id=request.id,
                created=request.created_s,
                model=request.model,
                system_fingerprint=self._fingerprint,
                choices=[],
                usage=usage,
            )
        )

    def response(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response."""
        request = self._request
        return self._encode(
            ChatCompletion(
                id=request.id,
                created=request.created_s,
                model=request.model,
                system_fingerprint=self._fingerprint,
                choices=[self._choice(choice) for choice in choices],
                usage=usage,
                prompt_token_ids=list(request.prompts[0]) if request.return_token_ids else UNSET,
            )
        )

    def _choice(self, choice: FinishedChoice) -> ChatChoice:
        logprobs = chat_logprobs(self._text, choice.tokens)
        ids = token_ids(self._request.return_token_ids, choice.tokens)
        last = choice.tokens[-1] if choice.tokens else None
        reason = stop_reason(self._request, self._text.eos_token_ids, choice.finish, choice.stop, last)
        return ChatChoice(choice.index, ChatMessage(choice.text), logprobs, choice.finish.value, ids, reason)
