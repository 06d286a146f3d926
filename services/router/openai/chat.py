"""Builds the responses of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton.domain.request import FinishReason
from baton.domain.scores.prompt_scores import PromptScores
from baton.services.router.openai.logprobs import TokenNamer, chat_logprobs, prompt_logprobs, token_ids
from baton.services.router.openai.response_builder import FinishedChoice, stop_reason
from baton.services.router.openai.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChatToolCall,
    FinishReasonName,
    FunctionCall,
    PromptLogprobs,
    Usage,
)
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.text.choice_text import TokenEvent
from baton.services.router.text.parsers.base import ToolCall, call_id, joined_calls
from baton.services.router.text.text_model import TextModel


class ChatResponseBuilder:
    """Builds the response to one chat."""

    def __init__(self, request: ValidRequest, text: TextModel, fingerprint: str) -> None:
        self._request = request
        self._text = text
        self._namer = TokenNamer.of(text, request)
        self._fingerprint = fingerprint
        self._encode = msgspec.json.Encoder().encode
        self._role_sent: set[int] = set()  # choices whose role is sent
        self._with_calls: set[int] = set()  # choices that have called a tool
        self._scores: Mapping[int, PromptScores] = {}

    def use_scores(self, scores: Mapping[int, PromptScores]) -> None:
        """See `ResponseBuilder.use_scores`."""
        self._scores = scores

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
            self._delta(event, role) if event.calls or event.reasoning else ChatDelta(event.text, role),
            None if token is None or token.logprobs is None else chat_logprobs(self._namer, [token]),
            None if event.finish is None else self._finish(event.choice, event.finish),
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
                prompt_logprobs=self._listed() if is_first else UNSET,
            )
        )

    def _delta(self, event: TokenEvent, role: Literal["assistant"] | UnsetType) -> ChatDelta:
        """A delta with calls or reasoning."""
        calls = self._calls(event.choice, event.calls, in_chunk=True) if event.calls else UNSET
        reasoning = self._reasoning(event.reasoning)
        calls, function_call = self._shaped(calls)
        content = event.text if event.text or not reasoning else UNSET
        return ChatDelta(content, role, calls, **reasoning, function_call=function_call)

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
                prompt_logprobs=self._listed(),
            )
        )

    def _listed(self) -> PromptLogprobs | UnsetType:
        request, scores = self._request, self._scores.get(0)
        if request.scores is None or request.scores.listed is None or scores is None:
            return UNSET
        return prompt_logprobs(self._text, request.prompts[0], scores, request.scores.listed)

    def _choice(self, choice: FinishedChoice) -> ChatChoice:
        logprobs = chat_logprobs(self._namer, choice.tokens)
        ids = token_ids(self._request.return_token_ids, choice.tokens)
        last = choice.tokens[-1] if choice.tokens else None
        reason = stop_reason(self._request, self._text.eos_token_ids, choice.finish, choice.stop, last)
        message = ChatMessage(choice.text)
        if choice.calls or choice.reasoning:
            calls = self._calls(choice.index, choice.calls, in_chunk=False) if choice.calls else UNSET
            calls, function_call = self._shaped(calls)
            reasoning = self._reasoning(choice.reasoning)
            message = ChatMessage(
                choice.text or None, "assistant", None, calls, **reasoning, function_call=function_call
            )
        return ChatChoice(choice.index, message, logprobs, self._finish(choice.index, choice.finish), ids, reason)

    def _reasoning(self, reasoning: str) -> dict[str, str]:
        """The fields of a message that hold its reasoning: none, or those of the setting."""
        requested = self._request.reasoning
        is_shown = reasoning and requested is not None and requested.is_shown
        return dict.fromkeys(self._text.formats.reasoning_fields, reasoning) if is_shown else {}

    def _calls(self, choice: int, calls: Sequence[ToolCall], *, in_chunk: bool) -> list[ChatToolCall]:
        self._with_calls.add(choice)
        tools = self._request.tools
        is_short = tools is not None and tools.format.has_short_ids
        return [
            ChatToolCall(
                id=call_id(self._request.id, choice, call.index, is_short=is_short) if call.name else UNSET,
                type="function" if call.name else UNSET,
                function=FunctionCall(name=call.name or UNSET, arguments=call.arguments),
                index=call.index if in_chunk else UNSET,
            )
            for call in joined_calls(calls)
        ]

    def _shaped(
        self, calls: list[ChatToolCall] | UnsetType
    ) -> tuple[list[ChatToolCall] | UnsetType, FunctionCall | UnsetType]:
        """Calls in the form of the request: `tool_calls`, and `function_call`, of which there is one at most."""
        tools = self._request.tools
        if calls is UNSET or tools is None or not tools.as_function_call:
            return calls, UNSET
        return UNSET, calls[0].function

    def _finish(self, choice: int, finish: FinishReason) -> FinishReasonName:
        """`tool_calls` for an answer that ends with calls of the model's choice; a named tool ends with `stop`.

        `function_call` for a call in the older form.
        """
        tools = self._request.tools
        called = choice in self._with_calls and tools is not None and not tools.is_named
        if not called or finish is not FinishReason.STOP:
            return finish.value
        return "function_call" if tools is not None and tools.as_function_call else "tool_calls"
