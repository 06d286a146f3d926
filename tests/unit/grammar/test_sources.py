"""Grammars of request fields: what they allow, and what is refused with a reason."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from baton.domain.errors import ConstraintFailed, FailedConstraint
from baton.grammar import sources
from tests import grammars

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1, None]}}, "required": ["a"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{3}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"const": {"deep": [1, "two"]}},
    {"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False}]},
    {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": {"type": "integer"}},
        "required": ["n", "next"],
        "additionalProperties": False,
    },
    {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "maxItems": 2,
    },
    {"allOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"required": ["a"]}], "maxProperties": 1},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "integer"}}, "additionalProperties": False},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=[json.dumps(schema)[:40] for schema in SCHEMAS])
def test_random_texts_of_a_schema_validate(schema: dict[str, Any]) -> None:
    constraint = grammars.constraint(sources.json_schema_grammar(schema))
    grammars.compiler().check(constraint)
    texts = [text for seed in range(12) if (text := grammars.random_text(constraint, seed)) is not None]
    assert texts
    for text in texts:
        jsonschema_rs.validate(schema, json.loads(text))


def test_whitespace_between_parts_is_bounded() -> None:
    constraint = grammars.constraint(sources.json_schema_grammar({"type": "array", "items": {"const": 1}}))
    for seed in range(20):
        text = grammars.random_text(constraint, seed)
        assert text is None or not re.search(r"   |\n\n|\t|\r", re.sub(r"\n {0,32}", " ", text))


def test_compact_json_has_no_whitespace() -> None:
    grammar = sources.json_schema_grammar({"enum": [{"a": [1, 2]}]}, any_whitespace=False)
    assert grammars.random_text(grammars.constraint(grammar), 1) == '{"a":[1,2]}'


def test_undeclared_properties_can_be_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    grammar = sources.json_schema_grammar(schema, additional_properties=False, any_whitespace=False)
    assert {grammars.random_text(grammars.constraint(grammar), seed) for seed in range(6)} == {'{"a":1}'}


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (sources.regex_grammar(r"[a-c]{2,5}-x+"), r"[a-c]{2,5}-x+"),
        (sources.choice_grammar(["yes", 'a "quoted" \\ one', "日本"]), r'yes|a "quoted" \\ one|日本'),
        (sources.grammar_text('start: "a" (" " word)*\nword: "b" | "c"'), r"a( [bc])*"),
        (sources.grammar_text('root ::= "x" tail\ntail ::= "y" | "z"'), r"x[yz]"),
    ],
)
def test_random_texts_match(text: str, pattern: str) -> None:
    texts = [grammars.random_text(grammars.constraint(text), seed) for seed in range(8)]
    assert all(text is None or re.fullmatch(pattern, text) for text in texts)
    assert any(texts)


def test_json_object_grammar_begins_with_a_brace() -> None:
    first = grammars.allowed(grammars.matcher(grammars.constraint(sources.json_object_grammar())))
    assert first
    assert all(grammars.decode([token]).startswith("{") for token in first)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, ["not", "/properties/a"]),
        ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        ({"type": "strin"}, ["strin"]),
        ({"$ref": "https://example.com/schema.json"}, ["$ref", "example.com"]),
    ],
)
def test_an_unusable_schema_is_explained(schema: object, words: list[str]) -> None:
    with pytest.raises(ConstraintFailed) as refused:
        grammars.compiler().check(grammars.constraint(sources.json_schema_grammar(schema)))
    assert all(word in str(sources.explain(schema, refused.value)) for word in words)
    assert refused.value.reason is FailedConstraint.COMPILE


def test_a_boolean_schema_allows_everything_or_nothing() -> None:
    text = grammars.random_text(grammars.constraint(sources.json_schema_grammar(True)), 1)
    assert text is not None
    json.loads(text)
    with pytest.raises(ConstraintFailed, match="false allows no text"):
        sources.json_schema_grammar(False)


@pytest.mark.parametrize("schema", ["text", 3, None, ["list"]])
def test_a_schema_is_an_object_or_a_boolean(schema: object) -> None:
    with pytest.raises(ConstraintFailed):
        sources.json_schema_grammar(schema)


def test_unknown_formats_are_annotations() -> None:
    constraint = grammars.constraint(sources.json_schema_grammar({"type": "string", "format": "phone", "maxLength": 3}))
    grammars.compiler().check(constraint)


@pytest.mark.parametrize("choices", [[], [""], ["a"] * 5000])
def test_choices_are_counted_and_not_empty(choices: list[str]) -> None:
    with pytest.raises(ConstraintFailed):
        sources.choice_grammar(choices)


@pytest.mark.parametrize("text", [r"a(?=b)", "([", r"(a)\1"])
def test_regular_expressions_are_regular(text: str) -> None:
    with pytest.raises(ConstraintFailed):
        grammars.compiler().check(grammars.constraint(sources.regex_grammar(text)))


UNREADABLE = (
    "::= x", "\u00a2\u0088}", "root ::= (" * 300, "start: (((", 'root ::= "a', "root ::= nobody", 'rot ::= "a"',
    'root ::= "a"\nstart ::= "b"',
)  # fmt: skip


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_grammar_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConstraintFailed):
        grammars.compiler().check(grammars.constraint(sources.grammar_text(text)))
