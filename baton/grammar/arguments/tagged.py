"""Arguments between tags, as Qwen 3 Coder and GLM write them: strings as they are, other values as JSON.

A schema's properties come in its order. A value that may be a string is one, whatever else it may be, unless its
strings are listed; "null" is no string where the schema has null. A value holds no closing tag. Where line ends at its
sides are none of it, only a string without any bound begins or ends with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.domain.errors import ConstraintFailed
from baton.grammar.arguments.schema_parts import (
    SECTIONS,
    PropertySpec,
    alternatives,
    members,
    not_kept,
    referenced,
    references_in,
    refuse_keywords,
    resolved,
    types_of,
    values_of,
)
from baton.grammar.arguments.text_values import ANY_TEXT, TextReader, string_texts, tagged_value
from baton.grammar.markers import KEY, NEWLINE, sequence, split
from baton.grammar.sources import json_rule

Json = Any

_KEY = r"[^<>\n \t\r](?:[^<>\n]{0,126}[^<>\n \t\r])?"
"""A name that both formats can read."""

MAX_RULES_BYTES = 64 * 1024
"""Of one tool: a larger grammar is refused by the compiler in any case."""

_EDGE = r"~/\n(?s:.*)/ & ~/(?s:.*)\n/"


@dataclass(frozen=True, slots=True)
class TagWriter:
    """`head` has `{key}` and stands before a value, `tail` after it; `close`, a part of it, is in no value.

    `strips`: a line end at either side of a value is none of it; False where head and tail have both.
    """

    head: str
    tail: str
    close: str
    strips: bool = False

    def rules(self, name: str, schema: Json, tokens: Mapping[str, int]) -> list[str]:
        """Rules of the arguments of `schema`; the first is `name`. Raises `ConstraintFailed`."""
        found = members(schema, schema, "")
        parts, rules = [], list[str]()
        num_rules = num_bytes = 0
        for index, member in enumerate(found.declared):
            if re.fullmatch(_KEY, member.name) is None or "{" in member.name:  # as in the places of a sequence
                raise ConstraintFailed(f"the name {member.name[:100]!r} at {member.path} cannot be written in a tag")
            part = f"{name}_{index}"
            parts.append(part if member.is_required else f"{part}?")
            head = sequence(self.head.replace(KEY, member.name), tokens)
            rules += self._parameter(part, head, member, schema, tokens)
            num_bytes += sum(map(len, rules[num_rules:]))
            num_rules = len(rules)
            if num_bytes > MAX_RULES_BYTES:
                raise ConstraintFailed(f"the arguments need more than {MAX_RULES_BYTES} bytes of rules")
        if found.others is not None:
            other, path = f"{name}_other", "/additionalProperties"
            parts.append(f"{other}*")
            head, rest = (sequence(part, tokens) for part in self.head.split(KEY))
            declared = "".join(f" & ~{_literal(member.name)}" for member in found.declared)
            rules.append(f"{other.upper()}: /{_KEY}/{declared}")
            member = PropertySpec("", found.others, path, is_required=False)
            rules += self._parameter(other, f"{head} {other.upper()} {rest}", member, schema, tokens)
        return [f"{name}: {' '.join(parts) or EMPTY}", *rules]

    def check_tool(self, name: str) -> None:
        """See `ArgumentsWriter.check_tool`."""

    def _parameter(
        self, name: str, head: str, member: PropertySpec, root: Json, tokens: Mapping[str, int]
    ) -> list[str]:
        """Rules of one parameter: its tags, and a value that is text, or JSON, or either."""
        value = tagged_value(member.schema, root)
        if not value.is_free and not value.texts:
            return self._json_parameter(name, head, _with_definitions(member.schema, root), tokens)
        texts, others = _values(member, root, value)
        first, *rest = split(self.tail, tokens)
        without = f"~/(?s:.*){re.escape(self.close).replace('/', BACKSLASH + '/')}(?s:.*)/"
        terminal, ending = f"{name.upper()}_TEXT", f" {json.dumps(first)}" if first else ""
        written = f"{terminal} {sequence(''.join(rest), tokens)}"
        if self.strips and texts != ANY_TEXT:
            without += f" & {_EDGE}"
            # The space behind it is needed: the library fails where a token follows a text that cannot go on.
            written = f"{self._space} {terminal} {self._space if not first else ''} {sequence(''.join(rest), tokens)}"
        written = f"{head} {written}"
        rules = [f"{terminal}: (({texts}) & {without}){ending}"]
        if not others:
            return [f"{name}: {written}", *rules]
        keyword = "oneOf" if "oneOf" in resolved(member.schema, root, member.path) else "anyOf"
        schema = _with_definitions({keyword: others} if len(others) > 1 else others[0], root)
        other = f"{name}_else"
        return [f"{name}: {written} | {other}", *rules, *self._json_parameter(other, head, schema, tokens)]

    @property
    def _space(self) -> str:
        """What may be at either side of a value and is none of it."""
        return sequence(NEWLINE, {}) if self.strips else ""

    def _json_parameter(self, name: str, head: str, schema: Json, tokens: Mapping[str, int]) -> list[str]:
        return [
            f"{name}: {head} {self._space} {name}_json {self._space} {sequence(self.tail, tokens)}",
            f"{name}_json: %json {json_rule(schema, additional_properties=False)}",
        ]


EMPTY, BACKSLASH = '""', "\\"


def _values(member: PropertySpec, root: Json, value: TextReader) -> tuple[str, list[Json]]:
    """A terminal of the strings of a parameter, and the schemas of its values that are JSON."""
    parts = alternatives(member.schema, root, member.path)
    if "oneOf" in "".join(path for _, path in parts) and sum(_has_strings(part) for part, _ in parts) > 1:
        raise not_kept("oneOf", member.path)
    texts, others = [_literal(text) for text in sorted(value.texts)], list[Json]()
    for part, path in parts:
        listed = values_of(part)
        if listed is not None:
            refuse_keywords(part, ("type", "enum", "const"), path)
            kept = [each for each in listed if not isinstance(each, str)]
            others += [{"enum": kept}] if kept else []
        elif "string" in types_of(part, {"string"}):
            texts.append(string_texts(_of_strings(part), path))
        else:
            others.append(part)
    if ANY_TEXT in texts:
        return ANY_TEXT, []
    texts += ['"null"'] if value.is_free and value.is_nullable else []
    return " | ".join(f"({text})" for text in texts), [] if value.is_free else others


def _has_strings(schema: Mapping[str, Json]) -> bool:
    listed = values_of(schema)
    return "string" in types_of(schema, {"string"}) if listed is None else any(isinstance(each, str) for each in listed)


_OF_OTHERS = frozenset(
    "multipleOf maximum exclusiveMaximum minimum exclusiveMinimum items prefixItems additionalItems maxItems minItems "
    "uniqueItems contains minContains maxContains maxProperties minProperties required properties patternProperties "
    "additionalProperties dependentRequired dependentSchemas propertyNames".split()
)


def _of_strings(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The schema without the keywords that say nothing of strings."""
    return {keyword: value for keyword, value in schema.items() if keyword not in _OF_OTHERS}


def _with_definitions(schema: Json, root: Json) -> Json:
    """The schema with those definitions of `root` that its references reach.

    Raises `ConstraintFailed` for another place of `root`: the schema of a parameter stands alone.
    """
    if not isinstance(schema, dict):
        return schema
    reached: dict[str, dict[str, Json]] = {}
    left = [schema]
    while left:
        for reference in references_in(left.pop()):
            section, name = _definition(reference)
            if name not in (found := reached.setdefault(section, {})):
                found[name] = referenced(f"#/{section}/{name.replace('~', '~0').replace('/', '~1')}", root, "")
                left.append(found[name])
    return {**reached, **schema}


def _definition(reference: str) -> tuple[str, str]:
    """Section and name of the definition at `#/$defs/...` or `#/definitions/...`."""
    parts = reference.split("/")
    if len(parts) < 3 or parts[0] != "#" or parts[1] not in SECTIONS:
        raise ConstraintFailed(f'"$ref" {reference[:100]!r} names no definition: calls of this format cannot keep it')
    return parts[1], parts[2].replace("~1", "/").replace("~0", "~")


def _literal(text: str) -> str:
    """A text in a terminal. Raises `ConstraintFailed` for one that is no Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConstraintFailed(f"{text[:100]!r} is no Unicode text") from None
    return json.dumps(text, ensure_ascii=False)
