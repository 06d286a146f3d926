"""Readers of blocks whose arguments are no JSON: XML parameters of Qwen 3 Coder and GLM, and Python of Llama.

Values of XML parameters are text; the schema of the tool says which are JSON. One that is not JSON stays text.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from baton.services.router.text.parsers.blocks import BlockState, FoundCalls
from baton.services.router.text.parsers.json_spans import SPACE, strict_json

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON Schemas of the arguments, by the name of the tool."""

MAX_HEAD_CHARS = 512
"""Of a block, up to the name."""

MAX_ENDS = 16
"""Texts in values that look like the end of a block."""

MAX_NESTING = 32
"""Of Python lists and dicts."""


class XmlReader:
    """Named parameters between tags.

    `head` matches the beginning with the name, `parameter` one parameter with `key` and `value`, `end` the end. What
    follows a value must be the next parameter or the end, so a value may hold a closing tag.
    """

    def __init__(
        self, schemas: Schemas, head: re.Pattern[str], parameter: re.Pattern[str], end: re.Pattern[str]
    ) -> None:
        self._schemas = schemas
        self._head = head
        self._parameter = parameter
        self._end = end
        self._from = 0
        self._num_failed = 0

    def read(self, text: str) -> FoundCalls | BlockState:
        """See `BlockReader.read`."""
        head = self._head.match(text)
        if head is None:
            return BlockState.OPEN if len(text) < MAX_HEAD_CHARS else BlockState.REJECTED
        if head["name"] not in self._schemas:
            return BlockState.REJECTED
        while (ended := self._end.search(text, self._from)) is not None:
            arguments = self._arguments(head["name"], text[head.end() : ended.start()])
            if arguments is not None:
                return FoundCalls(ended.end(), ((head["name"], arguments),))
            self._from = ended.start() + 1
            self._num_failed += 1
            if self._num_failed == MAX_ENDS:
                return BlockState.REJECTED
        return BlockState.OPEN

    def begun(self, text: str) -> None:
        """See `BlockReader.begun`. What the model writes is not the JSON of the arguments."""

    def _arguments(self, name: str, text: str) -> str | None:
        """The parameters as a JSON object; None if the text is not made of them."""
        properties = self._schemas[name].get("properties")
        found: dict[str, object] = {}
        at = 0
        while (parameter := self._parameter.match(text, at)) is not None:
            key, at = parameter["key"].strip(), parameter.end()
            value = parameter["value"].removeprefix("\n").removesuffix("\n")
            found[key] = _typed(value, properties.get(key) if isinstance(properties, dict) else None)
        return None if text[at:].strip(SPACE) else json.dumps(found, ensure_ascii=False)


def _typed(value: str, schema: object) -> object:
    """The value as its schema wants it: text, or JSON if the text is JSON."""
    if not isinstance(schema, dict) or "string" in _types(schema):
        return value
    try:
        return strict_json(value)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema names; those of an enum, too. A schema that names none allows text."""
    given = schema.get("type")
    named = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for part in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        named |= _types(part) if isinstance(part, dict) else set()
    if not named and isinstance(schema.get("enum"), list):
        named = {"string" if isinstance(value, str) else "other" for value in schema["enum"]}
    return named or {"string"}


class PythonReader:
    """A list of Python calls with keywords, `[name(city="Oslo", days=2)]`, whose values are literals."""

    _HEAD = re.compile(r"\s*\[\s*(?P<name>[A-Za-z_][\w.]*)\s*\(")
    _BEGUN = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*\s*)?)?")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._at = 0
        self._brackets = 0
        self._has_ended = False
        self._quote = ""
        self._escaped = False

    def read(self, text: str) -> FoundCalls | BlockState:
        """See `BlockReader.read`."""
        head = self._HEAD.match(text)
        if head is None:
            begun = self._BEGUN.fullmatch(text, 0, MAX_HEAD_CHARS) is not None and len(text) < MAX_HEAD_CHARS
            return BlockState.OPEN if begun else BlockState.REJECTED
        if head["name"] not in self._names or not self._scan(text):
            return BlockState.REJECTED
        if not self._has_ended:
            return BlockState.OPEN
        calls = _python_calls(text[: self._at])
        is_known = calls is not None and all(name in self._names for name, _ in calls)
        return FoundCalls(self._at, calls) if calls and is_known else BlockState.REJECTED

    def begun(self, text: str) -> None:
        """See `BlockReader.begun`. What the model writes is not the JSON of the arguments."""

    def _scan(self, text: str) -> bool:
        """Reads on to the end of the list, or of the text; False if it is nested too deeply."""
        while self._at < len(text) and not self._has_ended:
            char = text[self._at]
            self._at += 1
            if self._quote:
                if char == self._quote and not self._escaped:
                    self._quote = ""
                self._escaped = char == "\\" and not self._escaped
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._brackets += 1
            elif char in ")]}":
                self._brackets -= 1
                self._has_ended = self._brackets == 0
            if self._brackets > MAX_NESTING:
                return False
        return True


def _python_calls(source: str) -> tuple[tuple[str, str], ...] | None:
    """Name and arguments of each call; None if the source is no list of calls with literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in strings
            body = ast.parse(source.strip(), mode="eval").body
        return tuple(map(_python_call, body.elts)) if isinstance(body, ast.List) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> tuple[str, str]:
    """Raises `ValueError` or `TypeError`."""
    if not isinstance(node, ast.Call) or node.args or not all(keyword.arg for keyword in node.keywords):
        raise ValueError("a call has keywords only")
    values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ast.unparse(node.func), json.dumps(values, ensure_ascii=False, allow_nan=False)
