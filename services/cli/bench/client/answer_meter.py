"""Parses one streamed answer and times its tokens. `bench_client` makes one meter a request; `connection` feeds it.

An event has content if it has text or, by the usage inside it, new tokens: a token may have no text of its own (half a
character, a special token), and its arrival counts too. Never raises: unreadable input is the answer's failure.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.services.cli.bench.client.sse import EventSplitter
from baton.services.cli.bench.results.records import Delivery, MeasuredAnswer

OK = 200
DONE = b"[DONE]"
MAX_ERROR_CHARS = 200
"""Characters of the server's output in a failure."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Event).decode


class AnswerMeter:
    """Times are readings of the caller's clock. `on_tokens` receives the number of tokens of every event."""

    def __init__(self, on_tokens: Callable[[int], None]) -> None:
        self._on_tokens = on_tokens
        self._events = EventSplitter()
        self._status = 0
        self._error_body = b""
        self._arrivals: list[tuple[float, int]] = []
        self._num_seen = 0
        self._usage: _Usage | None = None
        self._ended_at_s: float | None = None
        self._finish_reason: str | None = None
        self._failure: str | None = None

    def on_status(self, status: int) -> None:
        """The response's status, before any of its body."""
        self._status = status

    def on_body(self, data: bytes, at_s: float) -> None:
        """A piece of the body, received at `at_s`."""
        if self._status != OK:
            self._error_body = (self._error_body + data)[:MAX_ERROR_CHARS]
            return
        for payload in self._events.feed(data):
            if payload != DONE:
                self._on_event(payload, at_s)

    def answer(self, sent_at_s: float, now_s: float, failure: str | None = None) -> MeasuredAnswer:
        """The answer, complete or not. `failure`: why the connection failed, None if it did not."""
        ended_at_s = now_s if self._ended_at_s is None else self._ended_at_s
        total = self._usage.completion_tokens if self._usage else 0
        return MeasuredAnswer(
            sent_at_s=sent_at_s,
            ended_s=ended_at_s - sent_at_s,
            deliveries=tuple(Delivery(at_s - sent_at_s, num) for at_s, num in self._arrivals),
            num_output_tokens=max(total, self._num_seen),
            num_prompt_tokens=self._usage.prompt_tokens if self._usage else None,
            finish_reason=self._finish_reason,
            failure=failure or self._failure_reason(),
        )

    def _on_event(self, payload: bytes, at_s: float) -> None:
        try:
            event = _decode(payload)
        except msgspec.DecodeError:
            self._fail(f"unreadable event: {_excerpt(payload)}")
            return
        if event.error is not None:
            self._fail(f"error event: {_excerpt(payload)}")
            return
        self._usage = event.usage or self._usage
        for choice in event.choices:
            self._note_tokens(choice, event.usage, at_s)
            if choice.finish_reason is not None:
                self._finish_reason, self._ended_at_s = choice.finish_reason, at_s

    def _note_tokens(self, choice: _Choice, usage: _Usage | None, at_s: float) -> None:
        num_new = usage.completion_tokens - self._num_seen if usage is not None else 0
        if num_new <= 0 and not choice.has_text:
            return
        num_new = max(1, num_new)
        self._num_seen += num_new
        self._arrivals.append((at_s, num_new))
        self._on_tokens(num_new)

    def _fail(self, words: str) -> None:
        self._failure = self._failure or words

    def _failure_reason(self) -> str | None:
        if self._status not in (0, OK):
            return f"HTTP {self._status}: {_excerpt(self._error_body)}"
        if self._failure is not None:
            return self._failure
        if self._finish_reason is None:
            return "the stream ended without a finish reason"
        return None if self._arrivals else "no event had content"


def _excerpt(words: bytes) -> str:
    return " ".join(words.decode(errors="replace").split())[:MAX_ERROR_CHARS]
