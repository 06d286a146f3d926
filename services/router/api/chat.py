"""The answers of /v1/chat/completions, whole and in chunks. `reader` makes one shape a call; `delivery` fills it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from services.router.api.calls import ValidChat
from services.router.api.logprobs import chat_logprobs, token_ids
from services.router.api.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    Usage,
)
from services.router.api.shape import WholeChoice
from services.router.text.choice_text import TokenEvent
from services.router.text.model import TextModel


class ChatShape:
    """One chat's answer."""

    def __init__(self, call: ValidChat, text: TextModel, fingerprint: str) -> None:
        self._call = call
        self._text = text
        self._fingerprint = fingerprint
        self._introduced: set[int] = set()  # choices whose role has been named

    def chunk(self, event: TokenEvent, usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        """One token; the first one of a choice names the role, never anything before it."""
        role: Literal["assistant"] | UnsetType = UNSET if event.choice in self._introduced else "assistant"
        self._introduced.add(event.choice)
        tokens = [event.token] if event.token is not None else []
        choice = ChatChunkChoice(
            index=event.choice,
            delta=ChatDelta(event.text, role),
            logprobs=chat_logprobs(self._text, tokens),
            finish_reason=event.finish.value if event.finish is not None else None,
            token_ids=token_ids(self._call.return_token_ids, tokens),
        )
        return self._chunk([choice], usage)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        """The extra chunk without choices."""
        return self._chunk([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> ChatCompletion:
        """All choices at once."""
        return ChatCompletion(
            id=self._call.id,
            created=self._call.created_s,
            model=self._call.model,
            system_fingerprint=self._fingerprint,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
        )

    def _whole_choice(self, choice: WholeChoice) -> ChatChoice:
        logprobs = chat_logprobs(self._text, choice.tokens)
        ids = token_ids(self._call.return_token_ids, choice.tokens)
        return ChatChoice(choice.index, ChatMessage(choice.text), logprobs, choice.finish.value, ids)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._call.id,
            created=self._call.created_s,
            model=self._call.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )
