"""The harmony format of gpt-oss: messages with a channel, and perhaps a recipient, between marker tokens.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, and
`<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>` is a call. Every other message is text. Only tokens
are markers; the prompt has begun the first message.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection

from baton.services.router.text.parsers.argument_stream import ArgumentStream, BegunCall, ConstrainedCalls
from baton.services.router.text.parsers.base import ParsedPiece, ToolCall
from baton.services.router.text.parsers.blocks import MAX_CALL_CHARS
from baton.services.router.text.parsers.json_spans import SPACE, is_object

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
MAX_HEADER_CHARS = 512
"""A longer header is text."""

_RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[A-Za-z0-9_.-]+)")
_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis\b")


class _Part(enum.Enum):
    HEADER = enum.auto()
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


class HarmonyParser:
    """Holds back headers and calls. A call that is none is text, verbatim."""

    def __init__(
        self,
        names: Collection[str] = (),
        *,
        single: bool = False,
        calls_only: bool = False,
        in_answer: bool = False,
        constrained: ConstrainedCalls = ConstrainedCalls.NONE,
    ) -> None:
        """`names`: of the declared tools. `in_answer`: the prompt has begun the text.

        `single`: what comes after the first call is dropped; `calls_only`: text is, too. `constrained`: with `ALL`
        calls are shown while they are written.
        """
        self._names = names
        self._single = single
        self._calls_only = calls_only
        self._is_certain = constrained is ConstrainedCalls.ALL
        self._stream: ArgumentStream | None = None
        self._part = _Part.TEXT if in_answer else _Part.HEADER
        self._header = ""
        self._arguments = ""
        self._num_calls = 0

    @property
    def is_done(self) -> bool:
        """True if nothing more is shown."""
        return self._single and self._num_calls > 0 and self._stream is None

    @property
    def in_reasoning(self) -> bool:
        """True while what comes is reasoning."""
        return self._part is _Part.REASONING

    @property
    def in_block(self) -> bool:
        """True while what comes may be part of a call."""
        return self._part in (_Part.HEADER, _Part.CALL)

    def push(self, piece: str) -> ParsedPiece:
        """See `OutputParser.push`."""
        if self.is_done or not piece:
            return ParsedPiece()
        if self._part is _Part.HEADER:
            self._header += piece
            return self._give_up() if len(self._header) > MAX_HEADER_CHARS else ParsedPiece()
        if self._stream is not None:
            return self._read_arguments(self._stream, "", piece)
        if self._part is _Part.CALL:
            self._arguments += piece
            if self._is_certain and (begun := self._begun()) is not None:
                self._stream, self._num_calls = ArgumentStream(begun), self._num_calls + 1
                return self._read_arguments(self._stream, begun.name, self._arguments[begun.at :])
            return self._give_up() if len(self._arguments) > MAX_CALL_CHARS else ParsedPiece()
        return ParsedPiece(reasoning=piece) if self.in_reasoning else self._text(piece)

    def push_marker(self, marker: str) -> ParsedPiece:
        """See `OutputParser.push_marker`."""
        if self.is_done:
            return ParsedPiece()
        if self._part is _Part.HEADER and marker == MESSAGE:
            self._begin_message()
            return ParsedPiece()
        if self._part is _Part.HEADER and marker in (START, CHANNEL, CONSTRAIN):
            return self.push(marker)
        if self._part is not _Part.HEADER and marker in (MESSAGE, CONSTRAIN):
            return self.push(marker)
        ended = self._end_message()
        self._part, self._header = _Part.HEADER, marker if marker in (START, CHANNEL) else ""
        return ended

    def finish(self) -> ParsedPiece:
        """See `OutputParser.finish`. A header without a message is nothing; text that is no header is text."""
        return ParsedPiece() if self.is_done else self._end_message()

    def _begun(self) -> BegunCall | None:
        """The call whose arguments have begun."""
        recipient, at = _RECIPIENT.search(self._header), len(self._arguments) - len(self._arguments.lstrip(SPACE))
        is_known = recipient is not None and recipient["name"] in self._names
        return (
            BegunCall(recipient["name"], at) if recipient and is_known and self._arguments[at : at + 1] == "{" else None
        )

    def _read_arguments(self, stream: ArgumentStream, name: str, text: str) -> ParsedPiece:
        """The next part of a call. What follows its arguments, up to the end of the message, is text."""
        part = stream.push(text)
        calls = (ToolCall(self._num_calls - 1, name, part.text),) if part.text else ()
        if part.rest is None:
            return ParsedPiece("", calls)
        self._stream, self._part = None, _Part.TEXT
        rest = "" if self.is_done else part.rest.lstrip(SPACE)
        return ParsedPiece("" if self._calls_only else rest, calls)

    def _begin_message(self) -> None:
        self._arguments = ""
        if _RECIPIENT.search(self._header) is not None:
            self._part = _Part.CALL
        else:
            self._part = _Part.REASONING if _ANALYSIS.search(self._header) else _Part.TEXT

    def _end_message(self) -> ParsedPiece:
        """What a message gives at its end: a call, or what was held back for one."""
        if self._part is _Part.HEADER:
            is_markup = not self._header.strip(SPACE) or CHANNEL in self._header or START in self._header
            return ParsedPiece() if is_markup else self._give_up()
        if self._stream is not None:  # it was cut
            self._stream = None
            return ParsedPiece()
        if self._part is not _Part.CALL:
            return ParsedPiece()
        nothing = "" if self._is_certain else "{}"  # a constraint asks for an object, so this one was cut
        recipient, arguments = _RECIPIENT.search(self._header), self._arguments.strip(SPACE) or nothing
        if recipient is None or recipient["name"] not in self._names or not is_object(arguments):
            return self._give_up()
        self._part = _Part.HEADER
        self._num_calls += 1
        return ParsedPiece("", (ToolCall(self._num_calls - 1, recipient["name"], arguments),))

    def _give_up(self) -> ParsedPiece:
        """What was held back is text."""
        held = self._header + (MESSAGE + self._arguments if self._part is _Part.CALL else "")
        self._part = _Part.TEXT
        return self._text(held)

    def _text(self, text: str) -> ParsedPiece:
        return ParsedPiece() if self._calls_only else ParsedPiece(text)
