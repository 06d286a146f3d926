"""Texts of grammars, from JSON Schemas, regular expressions, choices, and Lark or GBNF grammars.

Called by routers. A wrong source raises `ConstraintFailed`; what only the compiler finds is explained by `explain`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from baton.domain.errors import ConstraintFailed
from baton.grammar.gbnf import as_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Json = Any

WHITESPACE = r"(?: |\n {0,32})?"
"""Between parts of a JSON text: nothing, one space, or a new line with its indent. Free whitespace might not end."""

MAX_CHOICES = 4096

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Values of `format` that are grammars. Others are annotations, as JSON Schema allows, and are dropped."""

_RESOURCE = re.compile(r"Resource '([^']{1,200})' is not present")

_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_MANY = ("prefixItems", "anyOf", "allOf", "oneOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def json_schema_grammar(
    schema: Json,
    *,
    whitespace_pattern: str | None = None,
    any_whitespace: bool = True,
    additional_properties: bool = True,
) -> str:
    """A JSON text of `schema`, an object or a boolean. Properties come in the schema's order.

    `whitespace_pattern`: a regular expression in place of `WHITESPACE`. `any_whitespace` False: none at all.
    `additional_properties` False: objects that declare properties have no others, unless their schema says so.
    """
    if not isinstance(schema, dict | bool):
        raise ConstraintFailed("a JSON Schema is an object or a boolean")
    if schema is False:
        raise ConstraintFailed("the JSON Schema false allows no text")
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
    if any_whitespace:
        options["whitespace_pattern"] = whitespace_pattern or WHITESPACE
    else:
        options["whitespace_flexible"] = False
    text = json.dumps(prepared_schema({} if schema is True else schema, additional_properties))
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    except ValueError as error:
        raise ConstraintFailed(f"the JSON Schema cannot be read: {error}") from None


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def regex_grammar(pattern: str) -> str:
    """A text that matches `pattern` as a whole."""
    if not pattern:
        raise ConstraintFailed("a regular expression must not be empty")
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of the texts."""
    if not choices or "" in choices or len(choices) > MAX_CHOICES:
        raise ConstraintFailed(f"a choice needs 1 to {MAX_CHOICES} texts, none of them empty")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def grammar_text(source: str) -> str:
    """A Lark grammar, or one in GBNF, whose first rule is `root`."""
    return LLMatcher.grammar_from_lark(as_lark(source))


def json_rule(schema: Json, additional_properties: bool) -> str:
    """The schema as a rule of a Lark grammar has it behind `%json`. See `json_schema_grammar`."""
    guidance = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
    return json.dumps({**prepared_schema(schema, additional_properties), "x-guidance": guidance})


def either_grammar(first: str, second: str) -> str:
    """A text of one of two grammars."""
    parts = [{**_parts(grammar)[0], "name": name} for grammar, name in ((first, "first"), (second, "second"))]
    return json.dumps({"grammars": [{"lark_grammar": "start: @first | @second"}, *parts]})


def after_optional_block(grammar: str, opening: str, closing: str) -> str:
    """A text of `grammar`, or a block and then the text. The block: a token `opening`, any text, a token `closing`."""
    grammars = _parts(grammar)
    start = f"start: ({opening} BLOCK? {closing})? @answer\nBLOCK: /(.|\\n)+/"
    whole = [{"lark_grammar": start}, {**grammars[0], "name": "answer"}, *grammars[1:]]
    return json.dumps({"grammars": whole})


def _parts(grammar: str) -> list[dict[str, Json]]:
    """The grammars of a text in the library's form: JSON, or one grammar in Lark."""
    parts: list[dict[str, Json]] = json.loads(grammar)["grammars"] if grammar.startswith("{") else []
    return parts or [{"lark_grammar": grammar}]


def explain(schema: Json, error: ConstraintFailed) -> ConstraintFailed:
    """The same error, with the place in the schema of the keyword that it names, or the address that it wants."""
    if remote := _RESOURCE.search(str(error)):
        why = f'a "$ref" or "$schema" names {remote[1]}: schemas of other addresses are not fetched'
        return ConstraintFailed(why, error.reason, param=error.param)
    for path, keyword in _keywords(schema, ""):
        if f'"{keyword}"' in str(error):
            return ConstraintFailed(f"{error} at {path or '/'}", error.reason, param=error.param)
    return error


def prepared_schema(schema: Json, additional_properties: bool) -> Json:
    """A copy without annotations that the compiler does not know. See `json_schema_grammar`."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    copy.pop("x-guidance", None)
    if copy.get("uniqueItems") is False:
        del copy["uniqueItems"]
    if isinstance(copy.get("format"), str) and copy["format"] not in FORMATS:
        del copy["format"]
    if not additional_properties and "properties" in copy:
        copy.setdefault("additionalProperties", False)
    for keyword in copy.keys() & {*_ONE, *_MANY, *_NAMED}:
        copy[keyword] = _prepared_below(keyword, copy[keyword], additional_properties)
    return copy


def _prepared_below(keyword: str, value: Json, additional_properties: bool) -> Json:
    if isinstance(value, dict) and keyword in _NAMED:
        return {name: prepared_schema(part, additional_properties) for name, part in value.items()}
    if isinstance(value, list):
        return [prepared_schema(part, additional_properties) for part in value]
    return prepared_schema(value, additional_properties) if keyword in _ONE else value


def _keywords(schema: Json, path: str) -> Iterator[tuple[str, str]]:
    """(path of the schema, keyword) for every keyword."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield path, keyword
        below = f"{path}/{keyword}"
        if keyword in _NAMED and isinstance(value, dict):
            for name, part in value.items():
                yield from _keywords(part, f"{below}/{name}")
        elif keyword in (*_ONE, *_MANY) and isinstance(value, list):
            for index, part in enumerate(value):
                yield from _keywords(part, f"{below}/{index}")
        elif keyword in _ONE:
            yield from _keywords(value, below)
