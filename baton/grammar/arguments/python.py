"""Arguments as keywords of a Python call, whose values are literals, as Llama writes them in `[name(key=value)]`.

A schema's properties come in its order. Numbers lie within 1e15 on both sides, unless the schema says otherwise; values
that it leaves free nest at most `MAX_FREE_DEPTH` deep.
"""

from __future__ import annotations

import ast
import json
import keyword
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.domain.errors import ConstraintFailed
from baton.grammar.arguments.schema_parts import (
    ObjectSpec,
    alternatives,
    counts,
    members,
    not_kept,
    refuse_keywords,
    resolved,
    types_of,
    values_of,
)
from baton.grammar.sources import FORMATS, json_rule

Json = Any

MAX_FREE_DEPTH = 3
MAX_DEPTH = 24
"""Of values in values."""

MAX_NUMBER = 10**15
ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")

_CHARS = {'"': r'(?:[^"\\\x00-\x1f\x7f]|\\["\'\\nrt])', "'": r"(?:[^'\\\x00-\x1f\x7f]|\\[\"'\\nrt])"}
_KEY = r'[^"\\\x00-\x1f\x7f]'
_IDENTIFIER = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class PythonWriter:
    """Keywords of a call."""

    def rules(self, name: str, schema: Json, tokens: Mapping[str, int]) -> list[str]:
        """Rules of the arguments of `schema`; the first is `name`. Raises `ConstraintFailed`."""
        found = members(schema, schema, "")
        for member in found.declared:
            check_identifier(member.name)
            if "." in member.name:
                raise ConstraintFailed(f"{member.name[:100]!r} is no name of a parameter in Python")
        writer = _LiteralWriter(name, schema)
        writer.write_members(name, found, _keyword, rf"/{_IDENTIFIER}/", "", "=", 1)
        return writer.rules

    def check_tool(self, name: str) -> None:
        """See `ArgumentsWriter.check_tool`."""
        check_identifier(name)


def check_identifier(name: str) -> None:
    """Raises `ConstraintFailed` for what is no name in Python, of a tool or a parameter."""
    parts = name.split(".")
    is_name = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
    if not is_name or unicodedata.normalize("NFKC", name) != name:
        raise ConstraintFailed(f"{name[:100]!r} is no name in Python, as calls of this format need it")


def _keyword(name: str) -> str:
    return json.dumps(f"{name}=", ensure_ascii=False)


class _LiteralWriter:
    """Collects the rules of values, under names that begin alike."""

    def __init__(self, prefix: str, root: Json) -> None:
        self.rules: list[str] = []
        self._prefix = prefix
        self._root = root
        self._num_names = 0
        self._free: dict[int, str] = {}
        self._known: dict[tuple[int, int], tuple[str, Json]] = {}

    def write_members(
        self,
        name: str,
        found: ObjectSpec,
        key: Callable[[str], str],
        other_key: str,
        open_key: str,
        after_key: str,
        depth: int,
    ) -> None:
        """The rule `name` of members with commas between. `key`: what stands before a declared value; `other_key`,
        between quotes of `open_key`, and `after_key`: before another one.
        """
        items = [f"{key(member.name)} {self._value(member.schema, member.path, depth)}" for member in found.declared]
        other = None
        if found.others is not None:
            other_name = self._new().upper()
            refused = [*(_text(member.name) for member in found.declared)]
            refused += [] if open_key else [f'"{word}"' for word in keyword.kwlist]
            self.rules.append(f"{other_name}: {other_key}{''.join(f' & ~{each}' for each in refused)}")
            value = self._value(found.others, "/additionalProperties", depth)
            quote = json.dumps(open_key) if open_key else ""
            other = f"{quote} {other_name} {json.dumps(open_key + after_key)} {value}"
        required = [member.is_required for member in found.declared]
        self._write_sequence(name, items, required, other)

    def _write_sequence(self, name: str, items: Sequence[str], required: Sequence[bool], other: str | None) -> None:
        """`rests[i]`: what may follow a member, from item i on. The first member has no comma before it."""
        rests = [self._new() for _ in range(len(items) + 1)]
        num_optional = required.index(True) if True in required else len(items)
        firsts = [f"{item} {rests[index + 1]}" for index, item in enumerate(items[: num_optional + 1])]
        if num_optional == len(items):
            firsts += [f"{other} {rests[-1]}", EMPTY] if other else [EMPTY]
        self.rules.append(f"{name}: {' | '.join(firsts)}")
        for index, item in enumerate(items):
            written = f"{COMMA} {item}" if required[index] else f"({COMMA} {item})?"
            self.rules.append(f"{rests[index]}: {written} {rests[index + 1]}")
        self.rules.append(f"{rests[-1]}: " + (f"({COMMA} {other})*" if other else EMPTY))

    def _value(self, schema: Json, path: str, depth: int) -> str:
        """The name of a rule of the literals of `schema`, which is written once for every depth."""
        if (known := self._known.get((id(schema), depth))) is not None:
            return known[0]
        if depth > MAX_DEPTH:
            raise ConstraintFailed(f"the schema at {path[:100]} is nested too deeply, or refers to itself")
        parts = alternatives(schema, self._root, path)
        if "oneOf" in resolved(schema, self._root, path):
            _check_disjoint([types_of(part, ALL_TYPES) for part, _ in parts], path)
        forms = [form for part, where in parts for form in self._forms(part, where, depth)]
        name = self._new()
        self.rules.append(f"{name}: {' | '.join(forms)}")
        self._known[id(schema), depth] = name, schema  # kept, so that its id stays its own
        return name

    def _forms(self, schema: Mapping[str, Json], path: str, depth: int) -> list[str]:
        """The literals of a schema without alternatives: one form a type, or one a listed value."""
        listed = values_of(schema)
        if listed is not None:
            refuse_keywords(schema, ("type", "enum", "const"), path)
            if not listed:
                raise ConstraintFailed(f"the schema at {path or '/'} allows nothing")
            return [form for value in listed for form in _listed(value, path)]
        if "type" not in schema and not any(each in schema for each in _OF_TYPES):
            refuse_keywords(schema, (), path)
            return [self._free_value(MAX_FREE_DEPTH)]
        types = types_of(schema, ALL_TYPES)
        of_types = [each for each in (*ALL_TYPES, "integer") if each in types]
        known = {key for each in of_types for key in _KEPT.get(each, ())}
        refuse_keywords(schema, ("type", *known), path)
        return [self._of_type(each, schema, path, depth) for each in of_types]

    def _of_type(self, kind: str, schema: Mapping[str, Json], path: str, depth: int) -> str:
        match kind:
            case "string":
                return self._string(schema, path)
            case "integer" | "number":
                return self._number(kind, schema, path)
            case "array":
                return self._array(schema, path, depth)
            case "object":
                return self._object(schema, path, depth)
        return '"None"' if kind == "null" else '"True" | "False"'

    def _string(self, schema: Mapping[str, Json], path: str) -> str:
        """One with a pattern is written as JSON has it: Python reads the same."""
        form = schema.get("format")
        if "pattern" in schema or (isinstance(form, str) and form in FORMATS):
            kept = {key: schema[key] for key in ("minLength", "maxLength", "pattern", "format") if key in schema}
            return self._json({"type": "string", **kept})
        least, most = counts(schema, "minLength", "maxLength", path)
        count = f"{{{least},{'' if most is None else most}}}"
        name = self._new().upper()
        forms = (f"/{quote}{chars}{count}{quote}/" for quote, chars in _CHARS.items())
        self.rules.append(f"{name}: {' | '.join(forms)}")
        return name

    def _number(self, kind: str, schema: Mapping[str, Json], path: str) -> str:
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        for key, bound in bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise ConstraintFailed(f'"{key}" at {path or "/"} is no number')
        lowest = max((bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds), default=-MAX_NUMBER)
        highest = min((bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds), default=MAX_NUMBER)
        if lowest == -MAX_NUMBER and highest >= -MAX_NUMBER:
            bounds.setdefault("minimum", -MAX_NUMBER)
        if highest == MAX_NUMBER and lowest <= MAX_NUMBER:
            bounds.setdefault("maximum", MAX_NUMBER)
        return self._json({"type": kind, **bounds})

    def _array(self, schema: Mapping[str, Json], path: str, depth: int) -> str:
        item = self._value(schema.get("items", {}), f"{path}/items", depth + 1)
        least, most = counts(schema, "minItems", "maxItems", path)
        if most == 0:
            return '"[" "]"'
        count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = item if most == 1 else f"{item} ({COMMA} {item}){count}"
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def _object(self, schema: Mapping[str, Json], path: str, depth: int) -> str:
        own = {key: schema[key] for key in _KEPT["object"] if key in schema}
        name, found = self._new(), members({"type": "object", **own}, self._root, path)
        self.write_members(name, found, _dict_key, f"/{_KEY}{{0,64}}/", '"', ": ", depth + 1)
        return f'"{{" {name} "}}"'

    def _free_value(self, depth: int) -> str:
        """The rule of any literal that nests at most `depth` deep."""
        if depth not in self._free:
            name = self._new()
            forms = [self._string({}, ""), self._number("number", {}, ""), '"True"', '"False"', '"None"']
            if depth:
                inner = self._free_value(depth - 1)
                forms.append(f'"[" ({inner} ({COMMA} {inner})*)? "]"')
                pair = f'/"{_KEY}{{0,64}}": /' + f" {inner}"
                forms.append(f'"{{" ({pair} ({COMMA} {pair})*)? "}}"')
            self.rules.append(f"{name}: {' | '.join(forms)}")
            self._free[depth] = name
        return self._free[depth]

    def _json(self, schema: Json) -> str:
        """A rule of JSON that is Python, too."""
        name = self._new()
        self.rules.append(f"{name}: %json {json_rule(schema, additional_properties=False)}")
        return name

    def _new(self) -> str:
        self._num_names += 1
        return f"{self._prefix}_{self._num_names}"


COMMA, EMPTY = "/, ?/", '""'

_KEPT = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": _BOUNDS,
    "integer": _BOUNDS,
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
_OF_TYPES = frozenset(key for kept in _KEPT.values() for key in kept)


def _check_disjoint(types: Sequence[set[str]], path: str) -> None:
    """Raises `ConstraintFailed` if a value could be of two of the alternatives."""
    seen: set[str] = set()
    for each in types:
        wide = each | ({"integer"} if "number" in each else set())
        if wide & seen:
            raise not_kept("oneOf", path)
        seen |= wide


def _listed(value: Json, path: str) -> list[str]:
    """The ways to write a value that a schema lists."""
    if isinstance(value, str):
        _text(value)
        return sorted({json.dumps(json.dumps(value, ensure_ascii=False)), json.dumps(repr(value))})
    try:
        is_literal = ast.literal_eval(repr(value)) == value and json.dumps(value, allow_nan=False).isprintable()
        repr(value).encode()
    except (ValueError, SyntaxError, RecursionError):
        is_literal = False
    if not is_literal:
        raise ConstraintFailed(f"a value of {path or '/'} cannot be written in Python")
    return [json.dumps(repr(value), ensure_ascii=False)]


def _dict_key(name: str) -> str:
    """Either quotes, a colon and a space."""
    forms = {f"{json.dumps(name, ensure_ascii=False)}: ", f"{name!r}: "}
    _text(name)
    return f"({' | '.join(json.dumps(form) for form in sorted(forms))})"


def _text(text: str) -> str:
    """A text in a terminal. Raises `ConstraintFailed` for one that is no Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConstraintFailed(f"{text[:100]!r} is no Unicode text") from None
    return json.dumps(text, ensure_ascii=False)
