"""The answers of /v1/chat/completions, whole and in chunks. `request_parser` makes one builder a request; `respond`
fills it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from services.router.openai.logprobs import chat_logprobs, token_ids
from services.router.openai.response_builder import FinishedChoice
from services.router.openai.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    Usage,
)
from services.router.openai.valid_request import ValidChatRequest
from services.router.text.choice_text import TokenEvent
from services.router.text.text_model import TextModel


class ChatResponseBuilder:
    """One chat's answer."""

    def __init__(self, request: ValidChatRequest, text: TextModel, fingerprint: str) -> None:
        self._request = request
        self._text = text
        self._fingerprint = fingerprint
        self._role_sent: set[int] = set()  # choices whose role has been named

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        """One token; the first one of a choice names the role, never anything before it."""
        role: Literal["assistant"] | UnsetType = UNSET if event.choice in self._role_sent else "assistant"
        self._role_sent.add(event.choice)
        tokens = [event.token] if event.token is not None else []
        choice = ChatChunkChoice(
            index=event.choice,
            delta=ChatDelta(event.text, role),
            logprobs=chat_logprobs(self._text, tokens),
            finish_reason=event.finish.value if event.finish is not None else None,
            token_ids=token_ids(self._request.return_token_ids, tokens),
        )
        return self._chunk([choice], usage)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        """The extra chunk without choices."""
        return self._chunk([], usage)

    def response(self, choices: Sequence[FinishedChoice], usage: Usage) -> ChatCompletion:
        """All choices at once."""
        return ChatCompletion(
            id=self._request.id,
            created=self._request.created_s,
            model=self._request.model,
            system_fingerprint=self._fingerprint,
            choices=[self._choice(choice) for choice in choices],
            usage=usage,
        )

    def _choice(self, choice: FinishedChoice) -> ChatChoice:
        logprobs = chat_logprobs(self._text, choice.tokens)
        ids = token_ids(self._request.return_token_ids, choice.tokens)
        return ChatChoice(choice.index, ChatMessage(choice.text), logprobs, choice.finish.value, ids)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._request.id,
            created=self._request.created_s,
            model=self._request.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )
