"""Finds JSON values in text as it comes, and the members of an object as they are written."""

from __future__ import annotations

import json
from json.decoder import scanstring  # type: ignore[attr-defined]

SPACE = " \t\r\n"


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)


class JsonScan:
    """The search for the end of an object or a list. Reads each character once, though the text is given again."""

    def __init__(self, opening: str = "{") -> None:
        """`opening`: characters that the value may begin with."""
        self._opening = opening
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Index after the value that `text` begins with; 0 if it begins with none; None if its end is not there."""
        while self._at < len(text):
            char = text[self._at]
            if self._depth == 0 and char not in SPACE and char not in self._opening:
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

    def next_end(self, text: str) -> int | None:
        """The same for a text that is given in parts: `text` is the next one, and the index is one of it."""
        self._at = 0
        return self.end(text)


class JsonStringScan:
    """Tells whether a place in a JSON text is in a string. Reads each character once; a line end ends a string."""

    def __init__(self) -> None:
        self._num_read = 0
        self._in_string = False
        self._escaped = False

    def is_open(self, text: str, begin: int, end: int) -> bool:
        """True if `text[begin:end]` ends in a string. `begin` is always the same; `end` does not shrink."""
        for char in text[begin + self._num_read : end]:
            if self._in_string:
                self._in_string = char != "\n" and (self._escaped or char != '"')
                self._escaped = char == "\\" and not self._escaped
            else:
                self._in_string = char == '"'
        self._num_read = max(self._num_read, end - begin)
        return self._in_string


def strict_json(text: str) -> object:
    """The value of a JSON text, without Python's NaN and Infinity. Raises `ValueError` or `RecursionError`."""
    return _decoder.decode(text)


def is_object(text: str) -> bool:
    """True if the text is a JSON object."""
    try:
        return isinstance(strict_json(text), dict)
    except (ValueError, RecursionError):
        return False


def call_of(source: str) -> tuple[str, str] | None:
    """Name and arguments of the object of a call, whose arguments are kept as they are written; None if it is none."""
    try:
        spans = members(source)
        name, arguments = strict_json(spans["name"]), spans.get("arguments", spans.get("parameters", "{}"))
    except (ValueError, LookupError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and is_object(arguments) else None


def members(source: str) -> dict[str, str]:
    """The members of a JSON object, as they are written. Raises `ValueError` or `RecursionError`."""
    found: dict[str, str] = {}
    at = source.index("{") + 1
    while (at := _skip(source, at)) < len(source) and source[at] == '"':
        key, at = scanstring(source, at + 1, True)
        at = _skip(source, at)
        if source[at] != ":":
            raise ValueError("a member has no value")
        begin = _skip(source, at + 1)
        _, at = _decoder.raw_decode(source, begin)
        found[key] = source[begin:at]
        at = _skip(source, at)
        if source[at] != ",":
            break
        at += 1
    if source[at] != "}":
        raise ValueError("an object has no end")
    return found


def elements(source: str) -> list[str]:
    """The elements of a JSON list, as they are written. Raises `ValueError` or `RecursionError`."""
    found: list[str] = []
    at = _skip(source, source.index("[") + 1)
    while source[at] != "]":
        begin = at
        _, at = _decoder.raw_decode(source, begin)
        found.append(source[begin:at])
        at = _skip(source, at)
        if source[at] == ",":
            at = _skip(source, at + 1)
        elif source[at] != "]":
            raise ValueError("a list has no end")
    return found


def _skip(source: str, at: int) -> int:
    while at < len(source) and source[at] in SPACE:
        at += 1
    return at
