"""Holds the output that a client has not read yet, packed into bytes, and bounds it.

`token_stream` owns one `UnreadBuffer` a stream and drains its source into it at once, so that no worker waits for a
client. `frontend` owns the one `UnreadBudget` of the router. Knows no clock and no socket.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.services.router.text.choice_text import TokenEvent
from baton.services.router.text.parsers.base import ToolCall
from baton.telemetry.metrics import UNREAD_BYTES

MAX_UNREAD_LOGPROB_BYTES = 1 << 20
"""Most bytes of unread logprobs of one stream; a client that leaves more is hung up."""

MAX_UNREAD_BYTES = 256 << 20
"""Most bytes of unread output of all streams; beyond it the client that read least recently is hung up."""

_COMPACT_BYTES = 64 * 1024
"""Bytes that were read are dropped in pieces of this size."""

_EVENT = struct.Struct("<IIIIIhH")  # choice, index, token, cached tokens, bytes of text, alternatives or -1, flags
_PARSED = struct.Struct("<I")
_IS_PARSED = 1 << 31
"""Of the bytes of text: reasoning and calls follow it, after their number of bytes. Few answers have any."""

_LOGPROB = struct.Struct("<d")
_ALTERNATIVE = struct.Struct("<Id")
_HAS_TOKEN = 1
_FINISHES: tuple[FinishReason | None, ...] = (None, *FinishReason)
_FINISH_BITS = 2
_IS_REASONING = 1 << 15
"""Of the flags: the token's bit, the finish, above both the index of the stop string plus one, and this one."""

_parsed_decoder = msgspec.json.Decoder(tuple[str, tuple[ToolCall, ...]])

_NUMBERS = {finish: number for number, finish in enumerate(_FINISHES)}


class UnreadBudget:
    """Bounds the unread bytes of all streams together. Owned by one event loop."""

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._buffers: dict[UnreadBuffer, None] = {}  # not empty; the one that was read least recently first

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._num_bytes

    def grow(self, buffer: UnreadBuffer, num_bytes: int) -> None:
        """Counts bytes of `buffer`. Overflows the buffers that were read least recently until the rest fits."""
        self._buffers.setdefault(buffer)
        self._count(num_bytes)
        while self._num_bytes > self._max_bytes:
            next(iter(self._buffers)).overflow()

    def shrink(self, buffer: UnreadBuffer, num_bytes: int) -> None:
        """Counts bytes of `buffer` that were read or dropped."""
        self._buffers.pop(buffer, None)
        if buffer.num_events:
            self._buffers[buffer] = None
        self._count(-num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        UNREAD_BYTES.inc(num_bytes)


class UnreadBuffer:
    """Events of one stream, first in, first out. `on_overflow`: called once, after which it stays empty."""

    def __init__(self, budget: UnreadBudget, on_overflow: Callable[[], None]) -> None:
        self._budget = budget
        self._on_overflow = on_overflow
        self._data = bytearray()
        self._start = 0
        self.num_events = 0  # read for every token
        self._num_logprob_bytes = 0
        self._overflowed = False

    def push(self, event: TokenEvent) -> None:
        """Adds an event. No effect after an overflow."""
        if self._overflowed:
            return
        is_parsed = bool(event.calls or event.reasoning)
        token, text, before = event.token, event.text.encode("utf-8", "surrogatepass"), len(self._data)
        logprobs = token.logprobs if token is not None else None
        flags = (token is not None) * _HAS_TOKEN | _NUMBERS[event.finish] << 1
        if event.is_reasoning:
            flags |= _IS_REASONING
        if event.stop is not None:
            flags |= event.stop + 1 << 1 + _FINISH_BITS
        index, id = (token.index, token.token) if token is not None else (0, 0)
        num_top = -1 if logprobs is None else len(logprobs.top)
        size = len(text) | (_IS_PARSED if is_parsed else 0)
        self._data += _EVENT.pack(event.choice, index, id, event.num_cached_tokens, size, num_top, flags)
        self._data += text
        if is_parsed:
            parsed = msgspec.json.encode((event.reasoning, event.calls))
            self._data += _PARSED.pack(len(parsed)) + parsed
        if logprobs is not None:
            self._data += _LOGPROB.pack(logprobs.logprob)
            for alternative in logprobs.top:
                self._data += _ALTERNATIVE.pack(*alternative)
        self.num_events += 1
        self._num_logprob_bytes += _logprob_bytes(num_top)
        self._budget.grow(self, len(self._data) - before)
        if self._num_logprob_bytes > MAX_UNREAD_LOGPROB_BYTES:
            self.overflow()

    def pop(self, max_events: int) -> list[TokenEvent]:
        """Removes and returns the oldest events."""
        events: list[TokenEvent] = []
        before = self._start
        while self.num_events and len(events) < max_events:
            events.append(self._pop())
        num_bytes = self._start - before
        if not self.num_events or self._start >= _COMPACT_BYTES:
            del self._data[: self._start]
            self._start = 0
        self._budget.shrink(self, num_bytes)
        return events

    def clear(self) -> None:
        """Drops all events."""
        if not self.num_events:
            return
        num_bytes = len(self._data) - self._start
        self._data, self._start, self.num_events, self._num_logprob_bytes = bytearray(), 0, 0, 0
        self._budget.shrink(self, num_bytes)

    def overflow(self) -> None:
        """Drops all events, and every later one; reports it once."""
        self.clear()
        if not self._overflowed:
            self._overflowed = True
            self._on_overflow()

    def close(self) -> None:
        """Drops all events, and every later one, and reports nothing. Idempotent."""
        self.clear()
        self._overflowed, self._on_overflow = True, _report_nothing

    def _pop(self) -> TokenEvent:
        choice, index, id, num_cached, size, num_top, flags = _EVENT.unpack_from(self._data, self._start)
        num_text = size & ~_IS_PARSED
        at = self._start + _EVENT.size
        text = self._data[at : at + num_text].decode("utf-8", "surrogatepass")
        at += num_text
        reasoning, calls = "", tuple[ToolCall, ...]()
        if size & _IS_PARSED:
            [num_parsed] = _PARSED.unpack_from(self._data, at)
            at += _PARSED.size
            reasoning, calls = _parsed_decoder.decode(self._data[at : at + num_parsed])
            at += num_parsed
        logprobs = None
        if num_top >= 0:
            [logprob] = _LOGPROB.unpack_from(self._data, at)
            at += _LOGPROB.size
            top = [_ALTERNATIVE.unpack_from(self._data, at + n * _ALTERNATIVE.size) for n in range(num_top)]
            at += num_top * _ALTERNATIVE.size
            logprobs = TokenLogprobs(logprob, tuple(top))
        self._start = at
        self.num_events -= 1
        self._num_logprob_bytes -= _logprob_bytes(num_top)
        token = OutputToken(index, id, logprobs) if flags & _HAS_TOKEN else None
        is_reasoning = bool(flags & _IS_REASONING)
        stop = ((flags & ~_IS_REASONING) >> 1 + _FINISH_BITS) - 1
        finish = _FINISHES[flags >> 1 & (1 << _FINISH_BITS) - 1]
        return TokenEvent(
            choice, token, text, num_cached, finish, None if stop < 0 else stop, calls, reasoning, is_reasoning
        )


def _logprob_bytes(num_top: int) -> int:
    return 0 if num_top < 0 else _LOGPROB.size + num_top * _ALTERNATIVE.size


def _report_nothing() -> None:
    """The overflow of a closed buffer: nobody reads it. Holds no reference to its stream."""
