"""One streamed answer: what it is made of, and its timing. Pure: events in, pieces out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class PartKind(Enum):
    """Kind of a piece of an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece to show, in order."""

    kind: PartKind
    text: str


class AnswerFailed(Exception):
    """The router ended the answer with an error. The message is the router's."""


@dataclass(slots=True)
class ChatAnswer:
    """Collects the events of one answer. Times are those of the caller's clock, in seconds."""

    started_s: float
    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    first_s: float | None = None
    last_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    num_resumed: int = 0
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, data: str, now_s: float) -> Iterator[AnswerPart]:
        """The pieces of one event's data. Raises `AnswerFailed` for an error event."""
        event = json.loads(data)
        if "error" in event:
            raise AnswerFailed(_message(event["error"]))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            pieces = list(self._pieces(choice))
            if pieces or choice.get("finish_reason"):
                self.first_s = now_s if self.first_s is None else self.first_s
                self.last_s = now_s
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            yield from pieces

    def _pieces(self, choice: dict[str, Any]) -> Iterator[AnswerPart]:
        delta = choice.get("delta") or {"content": choice.get("text")}  # chat, or a completion
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            self.reasoning += reasoning
            yield AnswerPart(PartKind.REASONING, reasoning)
        if content := delta.get("content"):
            self.content += content
            yield AnswerPart(PartKind.TEXT, content)
        for call in delta.get("tool_calls") or ():
            yield AnswerPart(PartKind.TOOL_CALL, self._call(call))

    def _call(self, part: dict[str, Any]) -> str:
        """Joins a part of a tool call to its other parts. Returns the text to show."""
        function = part.get("function") or {}
        index = part.get("index", len(self._calls))
        known = self._calls.get(index)
        arguments = function.get("arguments") or ""
        if known is None:
            name = function.get("name") or ""
            inner = {"name": name, "arguments": arguments}
            self._calls[index] = {"id": part.get("id") or f"call-{index}", "type": "function", "function": inner}
            return f"{name}({arguments}"
        known["function"]["arguments"] += arguments
        return str(arguments)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls as a message of the history has them."""
        return [self._calls[index] for index in sorted(self._calls)]

    def stats(self) -> str:
        """`TTFT 312 ms - 41 tok/s - 57 tokens - 512 cached`, of what is known."""
        parts = []
        num_tokens = self.usage.get("completion_tokens")
        if self.first_s is not None:
            parts.append(f"TTFT {1000 * (self.first_s - self.started_s):.0f} ms")
        if self.first_s is not None and self.last_s is not None and num_tokens and self.last_s > self.first_s:
            parts.append(f"{(num_tokens - 1) / (self.last_s - self.first_s):.0f} tok/s")
        if num_tokens is not None:
            parts.append(f"{num_tokens} tokens")
        if cached := (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
            parts.append(f"{cached} cached")
        if self.num_resumed:
            parts.append(f"resumed {self.num_resumed}x")
        if self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.finish_reason}")
        return " - ".join(parts)


def _message(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    code = error.get("code")
    return f"{error.get('message', 'unknown error')}" + (f" ({code})" if code else "")


def refusal(status: int, content: bytes) -> AnswerFailed:
    """The error of an HTTP response that is no stream."""
    try:
        message = _message(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace")[:300] or "no text"
    hint = " Give a key with --api-key or BATON_API_KEY." if status == 401 else ""
    return AnswerFailed(f"HTTP {status}: {message}{'' if message.endswith('.') else '.'}{hint}")
