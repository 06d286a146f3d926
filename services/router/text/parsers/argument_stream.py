"""Arguments of a call while the model writes them, for calls that a constraint keeps to their format.

Such a call can be cut, but it cannot turn out to be none, so its name and the arguments so far may be shown at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.services.router.text.parsers.json_spans import SPACE, JsonScan


class ConstrainedCalls(enum.Enum):
    """Which calls of an answer a constraint keeps to their format: none, those after the marker's token, or all."""

    NONE = "none"
    AFTER_MARKER = "after_marker"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class BegunCall:
    """A call whose arguments have begun. `at`: their index in the block.

    `in_object`: a brace follows them, for they are a member of an object; `in_list`: that object is one of a list.
    """

    name: str
    at: int
    in_object: bool = False
    in_list: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """Arguments that were written, and what follows the call once it has ended. `has_more`: that is the list's rest."""

    text: str
    rest: str | None = None
    has_more: bool = False


class ArgumentStream:
    """Reads arguments, which are an object, and what closes their call. Each character is read once, and not kept."""

    def __init__(self, call: BegunCall) -> None:
        self._call = call
        self._scan = JsonScan()
        self._closing: str | None = None  # what came after the arguments so far; None while they last

    def push(self, text: str) -> ArgumentsPart:
        """Reads what comes next. Not called again once the call has ended."""
        arguments = ""
        if self._closing is None:
            end = self._scan.next_end(text)
            if end is None:
                return ArgumentsPart(text)
            arguments, text, self._closing = text[:end], text[end:], ""
        self._closing += text
        return self._close(arguments, self._closing)

    def _close(self, arguments: str, closing: str) -> ArgumentsPart:
        if not self._call.in_object:
            return ArgumentsPart(arguments, closing)
        begun = closing.lstrip(SPACE)
        if not begun:
            return ArgumentsPart(arguments)
        if begun[0] != "}":
            return ArgumentsPart(arguments, closing)
        if not self._call.in_list:
            return ArgumentsPart(arguments, begun[1:])
        after = begun[1:].lstrip(SPACE)
        if not after:
            return ArgumentsPart(arguments)
        if after[0] == ",":
            return ArgumentsPart(arguments, f"[{after[1:]}", has_more=True)
        return ArgumentsPart(arguments, after.removeprefix("]"))
