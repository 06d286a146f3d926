"""Readers of blocks whose arguments are no JSON: tags of Qwen 3 Coder and GLM, and Python of Llama.

Values between tags are text; the schema of the tool says which are JSON. One that is not JSON stays text.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from baton.domain.errors import ConstraintFailed
from baton.grammar.arguments.schema_parts import resolved
from baton.grammar.arguments.text_values import TextReader, tagged_value
from baton.services.router.text.parsers.blocks import BlockState, FoundCalls
from baton.services.router.text.parsers.json_spans import SPACE, JsonStringScan

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON Schemas of the arguments, by the name of the tool."""

MAX_HEAD_CHARS = 512
"""Of a block, up to the name, and of tags up to a value."""

MAX_NESTING = 32
"""Of Python lists and dicts."""

_STRING_REST = re.compile(r'(?:[^"\\\n]|\\[^\n])*')
"""Of a JSON string, up to its end or to a line end."""


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """`head` matches the beginning with the name, `parameter` the tags before a value, with its `key`.

    `opening`: the text that every parameter begins with; `close` ends a value, `end` the call.
    """

    head: re.Pattern[str]
    parameter: re.Pattern[str]
    opening: str
    close: str
    end: str


class TagReader:
    """Named parameters between tags. Reads each character once, though the text is given again.

    A value may hold a closing tag: what follows a value is the next parameter or the end.
    """

    def __init__(self, schemas: Schemas, syntax: TagSyntax) -> None:
        self._schemas = schemas
        self._syntax = syntax
        self._name: str | None = None
        self._at = 0  # what is read
        self._key: str | None = None  # of the value that has begun at `_at`
        self._value: TextReader | None = None
        self._from = 0  # where its closing tag is looked for
        self._string = JsonStringScan()
        self._doubtful: int | None = None  # the first closing tag that may be in a string of the value
        self._rest_at: int | None = None  # what is read of that string
        self._found: dict[str, str] = {}

    def read(self, text: str) -> FoundCalls | BlockState:
        """See `BlockReader.read`."""
        if self._name is None and not self._read_head(text):
            return BlockState.OPEN if len(text) < MAX_HEAD_CHARS else BlockState.REJECTED
        if self._name not in self._schemas:
            return BlockState.REJECTED
        while True:
            if self._key is None:
                state = self._read_tags(text)
                if state is not None:
                    return state
            elif not self._read_value(text):
                return BlockState.OPEN

    def begun(self, text: str) -> None:
        """See `BlockReader.begun`. What the model writes is not the JSON of the arguments."""

    def _read_head(self, text: str) -> bool:
        head = self._syntax.head.match(text, 0, MAX_HEAD_CHARS)
        if head is not None:
            self._name, self._at = head["name"], head.end()
        return head is not None

    def _read_tags(self, text: str) -> FoundCalls | BlockState | None:
        """The call if it ends here; None if a value begins here."""
        syntax, rest = self._syntax, text[self._at : self._at + MAX_HEAD_CHARS].lstrip(SPACE)
        if rest.startswith(syntax.end):
            after = text.index(syntax.end, self._at) + len(syntax.end)
            arguments = ", ".join(f"{_json(key)}: {value}" for key, value in self._found.items())
            return FoundCalls(after, ((str(self._name), f"{{{arguments}}}"),))
        opened = syntax.parameter.match(text, self._at, self._at + MAX_HEAD_CHARS)
        if opened is None:
            is_over = len(text) - self._at >= MAX_HEAD_CHARS or not _may_begin(rest, syntax)
            return BlockState.REJECTED if is_over else BlockState.OPEN
        self._key, self._at, self._from = opened["key"].strip(), opened.end(), opened.end()
        root = self._schemas[str(self._name)]
        try:
            schema = resolved(root, root, "")
        except ConstraintFailed:
            schema = root
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        own = properties.get(self._key, others) if isinstance(properties, dict) else others
        self._value, self._string = tagged_value(own, root), JsonStringScan()
        self._doubtful = self._rest_at = None
        return None

    def _read_value(self, text: str) -> bool:
        """False if the end of the value is not there.

        A closing tag in an open JSON string ends the value after all where what follows is no rest of such a string:
        a quote was odd. Otherwise the value would go on into the next call.
        """
        syntax = self._syntax
        if self._value is None or self._key is None:
            raise ValueError("no value has begun")
        while (closed := text.find(syntax.close, self._from)) >= 0:
            if self._doubtful is not None and self._is_odd(text):
                return self._end_value(text, self._doubtful)
            after = closed + len(syntax.close)
            rest = text[after : after + MAX_HEAD_CHARS].lstrip(SPACE)
            value = text[self._at : closed].removeprefix("\n").removesuffix("\n")
            may_be_inside = self._value.is_json(value) and self._string.is_open(text, self._at, closed)
            if not may_be_inside and rest.startswith((syntax.opening, syntax.end)):
                is_end = self._doubtful is None or self._value.is_valid_json(value)
                return self._end_value(text, closed if is_end else self._doubtful)
            is_decided = may_be_inside and self._doubtful is not None
            if may_be_inside and not is_decided and rest.startswith((syntax.opening, syntax.end)):
                self._doubtful = self._rest_at = closed
            elif not is_decided and _may_begin(rest, syntax) and len(text) - after < MAX_HEAD_CHARS:
                self._from = closed
                return False
            self._from = closed + 1
        self._from = max(self._from, len(text) - len(syntax.close) + 1)
        return self._doubtful is not None and self._is_odd(text) and self._end_value(text, self._doubtful)

    def _end_value(self, text: str, closed: int | None) -> bool:
        """The value ends at this closing tag."""
        if self._value is None or self._key is None or closed is None:
            raise ValueError("no value has begun")
        value = text[self._at : closed].removeprefix("\n").removesuffix("\n")
        self._found[self._key], self._key = self._value.read(value), None
        self._at = closed + len(self._syntax.close)
        return True

    def _is_odd(self, text: str) -> bool:
        """True if the string that holds a doubtful tag has a line end, which JSON does not allow. Reads on only."""
        if self._rest_at is None:
            return False
        rest = _STRING_REST.match(text, self._rest_at)
        self._rest_at = self._rest_at if rest is None else rest.end()
        if text.startswith('"', self._rest_at):  # the string has an end
            self._rest_at = None
            return False
        return text.startswith(("\n", "\\\n"), self._rest_at)


def _may_begin(rest: str, syntax: TagSyntax) -> bool:
    """True if what follows, without spaces, is the beginning of a parameter or of the end, as far as it goes."""
    return any(tag.startswith(rest[: len(tag)]) for tag in (syntax.opening, syntax.end))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


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
