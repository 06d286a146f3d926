"""Tool calls as Hermes, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call ends where its JSON ends. It is shown when it is complete, its name is declared and its arguments are an object;
any other block stays text, verbatim, so nothing that was shown is ever taken back. Whitespace before a call is part of
it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from json.decoder import scanstring  # type: ignore[attr-defined]

from services.router.text.parsers.base import ParsedPiece, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL_CHARS = 64 * 1024
"""Of one call; a longer one is text."""

_SPACE = " \t\r\n"
_decoder = json.JSONDecoder()


class HermesParser:
    """Holds back a marker that has begun, whitespace before one, and the block after it."""

    def __init__(self, names: Collection[str], *, single: bool = False, calls_only: bool = False) -> None:
        """`names`: of the declared tools. `single`: what comes after the first call is dropped; `calls_only`: text is,
        too, such as the beginning of a call that was cut.
        """
        self._names = frozenset(names)
        self._single = single
        self._calls_only = calls_only
        self._held = ""
        self._block: _Block | None = None
        self._closes = False  # a call has ended, and its closing marker may come
        self._num_calls = 0

    @property
    def is_done(self) -> bool:
        """True if nothing more is shown."""
        return self._single and self._num_calls > 0

    @property
    def in_reasoning(self) -> bool:
        """False: the format has none."""
        return False

    @property
    def in_block(self) -> bool:
        """True while what comes may be part of a call."""
        return self._block is not None

    def push(self, piece: str) -> ParsedPiece:
        """See `OutputParser.push`."""
        text, calls = "", list[ToolCall]()
        self._held += piece
        while not self.is_done:
            if self._block is None:
                shown, found = self._read_text()
                text += shown
                if not found:
                    break
            ended = self._read_block()
            if ended is None:
                break
            if isinstance(ended, str):
                text += ended
            else:
                calls.append(ended)
        return ParsedPiece("" if self._calls_only else text, tuple(calls))

    def push_marker(self, marker: str) -> ParsedPiece:
        """See `OutputParser.push_marker`. Markers count as text, too: not every vocabulary has them."""
        return self.push(marker)

    def finish(self) -> ParsedPiece:
        """See `OutputParser.finish`. A block without an end is text; whitespace after a call is nothing."""
        rest = ("" if self._block is None else self._block.opening) + self._held
        self._held, self._block = "", None
        is_over = self.is_done or self._calls_only or (self._num_calls > 0 and not rest.strip(_SPACE))
        return ParsedPiece() if is_over else ParsedPiece(rest)

    def _read_text(self) -> tuple[str, bool]:
        """Text before the next marker, and True if the marker is there; the block begins then."""
        if self._closes:
            rest = self._held.lstrip(_SPACE)
            if CLOSE.startswith(rest) and rest != CLOSE:
                return "", False
            self._closes = False
            self._held = rest.removeprefix(CLOSE) if rest.startswith(CLOSE) else self._held
        at = self._held.find(OPEN)
        if at < 0:
            cut = len(self._held) - _num_held(self._held)
            shown, self._held = self._held[:cut], self._held[cut:]
            return shown, False
        shown = self._held[:at].rstrip(_SPACE)
        self._block = _Block(self._held[len(shown) : at + len(OPEN)])
        self._held = self._held[at + len(OPEN) :]
        return shown, True

    def _read_block(self) -> ToolCall | str | None:
        """The call, or the block's opening if it is none; None: more is needed."""
        if self._block is None:
            return None
        end = self._block.end_of_object(self._held)
        if end is None and len(self._held) <= MAX_CALL_CHARS:
            return None
        opening, call = self._block.opening, self._call(self._held[:end]) if end else None
        self._block = None
        if call is None:
            return opening
        self._held, self._closes = self._held[end:], True
        self._num_calls += 1
        return call

    def _call(self, source: str) -> ToolCall | None:
        """The call of a JSON object, whose arguments are kept as they are written."""
        try:
            spans = _members(source)
            name, arguments = json.loads(spans["name"]), spans.get("arguments", spans.get("parameters", "{}"))
            valid = isinstance(json.loads(arguments), dict)
        except (ValueError, KeyError, RecursionError):
            return None
        return ToolCall(self._num_calls, name, arguments) if valid and name in self._names else None


class _Block:
    """The search for the end of a block's JSON object. `opening`: the text before it, marker included."""

    def __init__(self, opening: str) -> None:
        self.opening = opening
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_of_object(self, text: str) -> int | None:
        """Index after the object that `text` begins with; 0 if it begins with none; None if its end is not there."""
        while self._at < len(text):
            char = text[self._at]
            if self._depth == 0 and char not in _SPACE and char != "{":
                return 0
            self._at += 1
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        return None


def _members(source: str) -> dict[str, str]:
    """The members of a JSON object, as they are written. Raises `ValueError`."""
    members: dict[str, str] = {}
    at = source.index("{") + 1
    while (at := _skip(source, at)) < len(source) and source[at] == '"':
        key, at = scanstring(source, at + 1, True)
        at = _skip(source, at)
        if source[at] != ":":
            raise ValueError("a member has no value")
        begin = _skip(source, at + 1)
        _, at = _decoder.raw_decode(source, begin)
        members[key] = source[begin:at]
        at = _skip(source, at)
        if source[at] != ",":
            break
        at += 1
    if source[at] != "}":
        raise ValueError("an object has no end")
    return members


def _skip(source: str, at: int) -> int:
    while at < len(source) and source[at] in _SPACE:
        at += 1
    return at


def _num_held(text: str) -> int:
    """Length of the longest suffix that may be whitespace before a marker, or its beginning."""
    for size in range(min(len(text), len(OPEN) - 1), -1, -1):
        if text.endswith(OPEN[:size]) or not size:
            rest = text[: len(text) - size]
            return size + len(rest) - len(rest.rstrip(_SPACE))
    return 0
