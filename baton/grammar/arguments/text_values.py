"""Values that are text between tags: how such a text is read, and which texts a schema allows.

Both a router's parser and the grammar go by `TextReader`, so a text that the grammar allows is read as a value of the
schema.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.domain.errors import ConstraintFailed
from baton.grammar.arguments.schema_parts import (
    MAX_ALTERNATIVES,
    counts,
    not_kept,
    referenced,
    refuse_keywords,
    types_of,
    values_of,
)
from baton.grammar.sources import FORMATS

Json = Any

ANY_TEXT = "/(?s:.*)/"
MAX_DEPTH = 16
"""Of references and alternatives, while a value is read."""

_DATE = "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE += "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P(?:[0-9]{1,4}W|(?:[0-9]{1,4}D)?T[0-9]{1,4}[HMS]|[0-9]{1,4}D)",
    "email": rf"[A-Za-z0-9_+-]{{1,20}}(?:\.[A-Za-z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,5}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": rf"(?:https?|ftp)://{_LABEL}(?:\.{_LABEL}){{0,5}}(?:/[A-Za-z0-9._~-]{{0,64}}){{0,16}}",
}
"""Regular expressions of some texts of each format, and of no others."""

_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}
_PATTERN_PARTS = {".": r"[^\n\r]", "/": r"\/"}


@dataclass(frozen=True, slots=True)
class TextReader:
    """How the text of a parameter is read. `texts`: strings that the schema lists. `is_free`: any other text is a
    string, too, or null if it says so and `is_nullable`. Every other text is JSON.
    """

    texts: frozenset[str]
    is_free: bool
    is_nullable: bool

    def read(self, text: str) -> str:
        """The value as JSON, written as it was if it is JSON. A text that is none stays a string."""
        if text in self.texts:
            return json.dumps(text, ensure_ascii=False)
        if self.is_free:
            return "null" if self.is_nullable and text == "null" else json.dumps(text, ensure_ascii=False)
        value = text.strip(" \t\r\n")
        if _is_json(value):
            return value
        return {"true": "true", "false": "false", "none": "null"}.get(value.lower()) or json.dumps(
            text, ensure_ascii=False
        )

    def is_valid_json(self, text: str) -> bool:
        """True if the text, without the space around it, is JSON."""
        return _is_json(text.strip(" \t\r\n"))

    def is_json(self, text: str) -> bool:
        """True if the text is no string of the schema."""
        return not self.is_free and text not in self.texts


def tagged_value(schema: Json, root: Json) -> TextReader:
    """How values of `schema`, a part of `root`, are read. What is no schema allows any text."""
    texts: set[str] = set()
    is_free = is_nullable = False
    for part in itertools.islice(_parts(schema, root, 0), MAX_ALTERNATIVES):
        types, listed = types_of(part, ()), values_of(part)
        is_nullable = is_nullable or "null" in types or None in (listed or ())
        if listed is not None:
            texts.update(value for value in listed if isinstance(value, str))
        else:
            is_free = is_free or not types or "string" in types
    return TextReader(frozenset(texts), is_free, is_nullable)


def _parts(schema: Json, root: Json, depth: int) -> Iterator[Mapping[str, Json]]:
    """All alternatives of a schema; keywords beside them are not read."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        yield {}
        return
    below: list[Json] = []
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        if isinstance(parts, list) and (keyword != "allOf" or len(parts) == 1) and "type" not in schema:
            below += parts
    if isinstance(reference := schema.get("$ref"), str):
        try:
            below.append(referenced(reference, root, ""))
        except ConstraintFailed:
            below.append({})
    for part in below:
        yield from _parts(part, root, depth + 1)
    if not below:
        yield schema


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


_syntax = json.JSONDecoder(parse_constant=_refuse, parse_int=str, parse_float=str)  # numbers of any size


def _is_json(text: str) -> bool:
    try:
        _syntax.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def string_texts(schema: Mapping[str, Json], path: str) -> str:
    """A terminal of the strings of `schema`, which lists none. Raises `ConstraintFailed`."""
    refuse_keywords(schema, ("type", "minLength", "maxLength", "pattern"), path)
    parts = []
    least, most = counts(schema, "minLength", "maxLength", path)
    if least or most is not None:
        parts.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    if isinstance(pattern := schema.get("pattern"), str):
        parts.append(f"/{searched(pattern, path)}/")
    if isinstance(format := schema.get("format"), str) and format in FORMATS:
        if format not in TEXT_FORMATS:
            raise not_kept(f"format: {format}", path)
        parts.append("/" + TEXT_FORMATS[format].replace("/", r"\/") + "/")
    return " & ".join(parts) or ANY_TEXT


def searched(pattern: str, path: str) -> str:
    """A regular expression, between slashes, of the texts in which JSON Schema finds `pattern`.

    Raises `ConstraintFailed` for what it cannot translate.
    """
    body, begins, ends = pattern, pattern.startswith("^"), False
    body = body[1:] if begins else body
    if body.endswith("$") and not _is_escaped(body):
        body, ends = body[:-1], True
    translated, has_alternatives = _translated(body, path)
    if has_alternatives and (begins or ends):
        raise ConstraintFailed(f'"pattern" at {path} has anchors beside "|": put the alternatives into a group')
    return f"{'' if begins else '(?s:.*)'}(?:{translated}){'' if ends else '(?s:.*)'}"


def _is_escaped(body: str) -> bool:
    """True if the last character is escaped."""
    return (len(body) - 1 - len(body[:-1].rstrip("\\"))) % 2 == 1


def _translated(body: str, path: str) -> tuple[str, bool]:
    """The pattern as the library reads it, and True if it has alternatives outside of groups."""
    out, depth, in_class, has_alternatives = "", 0, False, False
    parts = re.findall(r"\\.|\[\^?\]|\[\^?|\(\?:|\(\?|.", body, re.DOTALL)
    for part in parts:
        if part[0] == "\\" and len(part) == 2:
            out += _translated_escape(part[1], in_class, path)
        elif in_class:
            out += re.sub(r"([\[&~])", r"\\\1", part)
            in_class = not part.endswith("]")
        elif part in ("^", "$", "(?", "[]", "[^]", "\\"):
            raise ConstraintFailed(f'"pattern" at {path} has {part!r} inside, which cannot be kept in this format')
        else:
            depth += part.startswith("(") - (part == ")")
            in_class, has_alternatives = part.startswith("["), has_alternatives or (part == "|" and depth == 0)
            out += _PATTERN_PARTS.get(part, part)
    return out.replace("\n", r"\n"), has_alternatives


def _translated_escape(char: str, in_class: bool, path: str) -> str:
    if char in "bBk0123456789c" or (in_class and char in "DW"):
        raise ConstraintFailed(f'"pattern" at {path} has \\{char}, which cannot be kept in this format')
    if char.lower() not in _CLASSES:
        return f"\\{char}"
    inner = _CLASSES[char.lower()]
    return inner if in_class else f"[{'^' if char.isupper() else ''}{inner}]"
