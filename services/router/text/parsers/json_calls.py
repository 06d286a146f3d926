"""Readers of blocks whose arguments are JSON, as the model wrote it: Hermes, Llama 3, Mistral, DeepSeek, Kimi."""

from __future__ import annotations

import re
from collections.abc import Collection

from baton.services.router.text.parsers.argument_stream import BegunCall
from baton.services.router.text.parsers.blocks import BlockState, FoundCalls
from baton.services.router.text.parsers.json_spans import SPACE, JsonScan, call_of, elements, is_object

MAX_HEAD_CHARS = 512
"""Between a marker and the arguments."""

_OBJECT_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[A-Za-z0-9_.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_LIST_HEAD = re.compile(r"\s*\[" + _OBJECT_HEAD.pattern)


class ObjectReader:
    """One object, `{"name": ..., "arguments": {...}}`. `first_keys`: those that it may begin with; () for any."""

    def __init__(self, names: Collection[str], first_keys: tuple[str, ...] = ()) -> None:
        self._names = names
        self._scan = JsonScan()
        self._first_keys = tuple(f'"{key}"' for key in first_keys)

    def read(self, text: str) -> FoundCalls | BlockState:
        """See `BlockReader.read`."""
        if self._first_keys:
            first = text.lstrip(SPACE).removeprefix("{").lstrip(SPACE)
            if not any(first.startswith(key) or key.startswith(first) for key in self._first_keys):
                return BlockState.REJECTED
        end = self._scan.end(text)
        if end is None:
            return BlockState.OPEN
        call = call_of(text[:end]) if end else None
        return FoundCalls(end, (call,)) if call is not None and call[0] in self._names else BlockState.REJECTED

    def begun(self, text: str) -> BegunCall | None:
        """See `BlockReader.begun`. The name must come first, as a constraint has it."""
        head = _OBJECT_HEAD.match(text, 0, MAX_HEAD_CHARS)
        return BegunCall(head["name"], head.end(), in_object=True) if head and head["name"] in self._names else None


class ListReader:
    """Mistral's older form, a list of objects, or the newer one, `name[ARGS]{...}`, perhaps with an id between."""

    _HEAD = re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._list = JsonScan("[")
        self._named = NamedReader(names, self._HEAD)

    def read(self, text: str) -> FoundCalls | BlockState:
        """See `BlockReader.read`."""
        begun = text.lstrip(SPACE)
        if not begun:
            return BlockState.OPEN
        if begun[0] != "[":
            return self._named.read(text)
        end = self._list.end(text)
        if end is None:
            return BlockState.OPEN
        try:
            calls = [call_of(each) for each in elements(text[:end])]
        except (ValueError, IndexError, RecursionError):
            return BlockState.REJECTED
        known = tuple(call for call in calls if call is not None and call[0] in self._names)
        return FoundCalls(end, known) if known and len(known) == len(calls) else BlockState.REJECTED

    def begun(self, text: str) -> BegunCall | None:
        """See `BlockReader.begun`."""
        if not text.lstrip(SPACE).startswith("["):
            return self._named.begun(text)
        head = _LIST_HEAD.match(text, 0, MAX_HEAD_CHARS)
        is_known = head is not None and head["name"] in self._names
        return BegunCall(head["name"], head.end(), in_object=True, in_list=True) if head and is_known else None


class NamedReader:
    """A name, markers, and an object with the arguments. `head` matches what comes before the object, up to it."""

    def __init__(self, names: Collection[str], head: re.Pattern[str]) -> None:
        self._names = names
        self._head = head
        self._begin: int | None = None
        self._name = ""
        self._scan = JsonScan()

    def read(self, text: str) -> FoundCalls | BlockState:
        """See `BlockReader.read`."""
        if self._begin is None:
            if text.find("{", 0, MAX_HEAD_CHARS) < 0:
                return BlockState.OPEN if len(text) < MAX_HEAD_CHARS else BlockState.REJECTED
            begun = self.begun(text)
            if begun is None:
                return BlockState.REJECTED
            self._begin, self._name = begun.at, begun.name
        end = self._scan.end(text[self._begin :])
        if end is None:
            return BlockState.OPEN
        arguments = text[self._begin : self._begin + end]
        if not end or not is_object(arguments):
            return BlockState.REJECTED
        return FoundCalls(self._begin + end, ((self._name, arguments),))

    def begun(self, text: str) -> BegunCall | None:
        """See `BlockReader.begun`."""
        brace, found = text.find("{", 0, MAX_HEAD_CHARS), self._head.match(text)
        is_head = found is not None and found.end() == brace and found["name"] in self._names
        return BegunCall(found["name"], brace) if found is not None and is_head else None
