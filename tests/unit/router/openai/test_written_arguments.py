"""Grammars of arguments that are no JSON: every walk is read as arguments of its schema, in pieces as at once."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.constraint import Constraint, GrammarPhase
from baton.domain.errors import ConstraintFailed
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import ConstraintMatcher, MaskTable
from baton.grammar.tokenizer import GrammarTokenizer
from baton.grammar.tool_calls import tool_calls_grammar
from baton.services.router.text.parsers.argument_stream import ConstrainedCalls
from baton.services.router.text.parsers.base import ParsedPiece, ToolCall
from baton.services.router.text.parsers.registry import TOOL_FORMATS
from baton.services.router.text.text_model import TextModel
from tests.unit.router.text.test_tool_formats import WRITERS
from tests.unit.router.text.text_models import marked

Json = Any
NAMES = ("qwen3_coder", "glm", "pythonic")
ENDINGS = {
    "qwen3_coder": ("\n</parameter>\n", "</function>\n</tool_call>"),
    "glm": ("</arg_value>", "</tool_call>", "\n</arg_value>"),
    "pythonic": ('"', "'", '")', ")", "]", "}"),
}
MAX_TOKENS = 400
LEAP_SECOND = (":60", ":59")
"""llguidance allows every 60th second, the validator only those that may be leap seconds."""


@cache
def model_of(name: str, has_tokens: bool = True) -> TextModel:
    return marked("{{ tools }}", TOOL_FORMATS[name].markers if has_tokens else ())


@cache
def compiler_of(name: str, has_tokens: bool) -> GrammarCompiler:
    model = model_of(name, has_tokens)
    return GrammarCompiler(GrammarTokenizer(model.tokenizer_json(), model.vocab_size, model.eos_token_ids))


def encode(name: str, has_tokens: bool, text: str) -> list[int]:
    return list(model_of(name, has_tokens).encode(text, add_special_tokens=False))


def begun(name: str, schemas: dict[str, Json], has_tokens: bool = True) -> ConstraintMatcher:
    """Before the first token of one or two calls."""
    format, model = TOOL_FORMATS[name], model_of(name, has_tokens)
    grammar = tool_calls_grammar(schemas, format.markup, model.added_tokens(format.markers), most=2)
    compiler = compiler_of(name, has_tokens)
    compiler.check(constraint := Constraint((GrammarPhase(grammar),), eos=model.eos_token_ids))
    return ConstraintMatcher(compiler.compile(constraint))


def walk(name: str, state: ConstraintMatcher, seed: int, has_tokens: bool) -> list[int] | None:
    """Random tokens up to an end; None if they are too many. What ends a value is written more often than by chance."""
    draw, model, tokens = random.Random(seed), model_of(name, has_tokens), list[int]()
    table, eos = MaskTable(1, compiler_of(name, has_tokens).tokenizer.num_words), model.eos_token_ids
    while len(tokens) < MAX_TOKENS:
        ending = encode(name, has_tokens, draw.choice(ENDINGS[name]))
        if draw.random() < 0.5 and state.num_allowed(ending) == len(ending):
            added = ending
        else:
            row = state.fill(table, 0, ())
            assert row is not None
            allowed = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
            if allowed & eos:
                return tokens
            added = [draw.choice(sorted(allowed))]
        for token in added:
            state.advance(token)
        tokens += added
    return None


def read(name: str, schemas: dict[str, Json], pieces: list[str]) -> ParsedPiece:
    parser = TOOL_FORMATS[name].parser(schemas, calls_only=True, constrained=ConstrainedCalls.ALL)
    found = ParsedPiece()
    for piece in pieces:
        found += parser.push(piece)
    return found + parser.finish()


def text_of(name: str, has_tokens: bool, tokens: list[int]) -> list[str]:
    detokenizer = model_of(name, has_tokens).detokenizer(skip_special_tokens=False)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


def closed(schema: Json, root: Json) -> Json:
    """The schema as formats keep it: an object that declares properties has no others."""
    if not isinstance(schema, dict):
        return schema
    parts: dict[str, Json] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            parts[key] = {name: closed(part, root) for name, part in value.items()}
        elif key in ("anyOf", "oneOf", "allOf"):
            parts[key] = [closed(part, root) for part in value]
        else:
            parts[key] = closed(value, root) if key == "items" else value
    return {"additionalProperties": False, **parts} if "properties" in parts else parts


def of_bounded_size(number: str) -> float:
    """A number that the validator can hold: schemas without bounds allow others."""
    return max(min(float(number), 1e300), -1e300)


def check(schemas: dict[str, Json], call: ToolCall) -> None:
    schema, arguments = (
        schemas[call.name],
        json.loads(call.arguments.replace(*LEAP_SECOND), parse_float=of_bounded_size),
    )
    jsonschema_rs.validator_for(closed(schema, schema), validate_formats=True).validate(arguments)
    declared = [*schema.get("properties", {})]
    assert [key for key in declared if key in arguments] == [key for key in arguments if key in declared]


STRINGS: st.SearchStrategy[Json] = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "description": "any", "default": "x", "format": "password"},
        {"type": "string", "minLength": 2, "maxLength": 6},
        {"type": "string", "maxLength": 0},
        {"type": "string", "pattern": r"^[a-c]{1,3}/\d\w?$"},
        {"type": "string", "pattern": "ab"},
        {"type": "string", "pattern": r"^(?:x\.|[^\d\n]-)+$", "maxLength": 9},
        {"type": "string", "pattern": "^\n?a\n?$"},
        *({"type": "string", "format": format} for format in ("date", "time", "date-time", "uuid", "ipv4", "duration")),
        *({"type": "string", "format": format} for format in ("email", "hostname", "uri")),
        {"type": "string", "enum": ["a b", "", "null", '5"', "it's", "\nx\n", "é\t\\"]},
        {"const": "<x>"},
    ]
)
OTHERS: st.SearchStrategy[Json] = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
        {"type": "number", "maximum": 2.5},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["boolean", "null"]},
        {"enum": [1, 2.5, None, True, [1, "a"], {"b": "</parameter>"}]},
    ]
)
MIXED: st.SearchStrategy[Json] = st.sampled_from(
    [
        {"type": ["string", "null"], "minLength": 3, "maxLength": 5},
        {"anyOf": [{"type": "string", "enum": ["auto", "5"]}, {"type": "integer"}]},
        {"enum": ["x", 1, None]},
        {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}]},
        {"$ref": "#/$defs/kind"},
        {"allOf": [{"$ref": "#/$defs/place"}], "description": "where"},
    ]
)
DEFINITIONS = {
    "kind": {"type": "string", "enum": ["near", "far"]},
    "place": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/kind"}, "x": {"type": "integer"}},
        "required": ["x"],
    },
}


def nested(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    return arrays | objects(inner)


def objects(values: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    names = st.sampled_from(["b", "a", "city_name", "Ort", "x1", "é"])
    properties = st.dictionaries(names, values, max_size=4)
    return properties.flatmap(
        lambda found: st.builds(
            lambda required: {"type": "object", "properties": found, "required": required},
            st.lists(st.sampled_from(sorted(found)), unique=True) if found else st.just([]),
        )
    )


VALUES = STRINGS | OTHERS | MIXED | nested(STRINGS | OTHERS | MIXED | nested(STRINGS | OTHERS))
SCHEMAS = st.fixed_dictionaries({"put": objects(VALUES), "now": st.just({"type": "object", "properties": {}})})


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(SCHEMAS, st.integers(0, 2**20), st.booleans())
def test_walks_are_calls_of_their_schema(name: str, schemas: dict[str, Json], seed: int, has_tokens: bool) -> None:
    schemas = {"put": {**schemas["put"], "$defs": DEFINITIONS}, "now": schemas["now"]}
    tokens = walk(name, begun(name, schemas, has_tokens), seed, has_tokens)
    if tokens is None:
        return
    pieces = text_of(name, has_tokens, tokens)
    found = read(name, schemas, pieces)
    assert found.calls, "".join(pieces)
    assert not found.text
    for call in found.calls:
        check(schemas, call)
    assert read(name, schemas, ["".join(pieces)]) == found == read(name, schemas, [*"".join(pieces)])


@pytest.mark.parametrize("name", NAMES)
def test_most_walks_end(name: str) -> None:
    """The test above has something to read."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
    walks = [walk(name, begun(name, {"put": schema}), seed, True) for seed in range(20)]
    assert sum(tokens is not None for tokens in walks) >= 10


@pytest.mark.parametrize("text", [{"pattern": "^\n?a\n?$"}, {"pattern": r"^(?:x\.|[^\d\n]-)+$", "maxLength": 9}])
def test_a_token_may_follow_a_text_that_cannot_go_on(text: Json) -> None:
    """llguidance 1.9 panics there if nothing but the token may follow."""
    schema = {"type": "object", "properties": {"a": {"type": "string", **text}}, "required": ["a"]}
    walks = [walk("glm", begun("glm", {"put": schema}), seed, True) for seed in range(20)]
    for tokens in filter(None, walks):
        for call in read("glm", {"put": schema}, text_of("glm", True, tokens)).calls:
            check({"put": schema}, call)
    assert any(walks)


PUT: Json = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}, "none": {"type": "null"}}},
    },
    "required": ["text", "count"],
}
CUT = "@@"
"""Where the text of a marker is cut into tokens, for the marker itself is another token; it is no part of a call."""
LONG = f"<b>\n\n</func{CUT}tion> </tool{CUT}_call>\n{{'quoted'}} \\ é\n"
TAGS = f"</arg{CUT}_value></tool{CUT}_call>"
WRITTEN_CALLS = [
    {"text": LONG, "count": -7},
    {"text": "", "count": 0, "where": "Oslo"},
    {"text": "a", "count": 10, "where": None, "tags": ["</parameter></function>", TAGS]},
    {"text": "a", "count": 1, "tags": [], "deep": {"on": True, "none": None}},
]
REFUSED_CALLS: list[dict[str, Json]] = [
    {"text": "a"},
    {"text": "a", "count": "x"},
    {"text": "a", "count": 1.5},
    {"text": "a", "count": 1, "other": "b"},
    {"count": 1, "text": "a"},
    {"text": "a", "count": 1, "tags": [1]},
    {"text": "a", "count": 1, "deep": {"on": 1}},
]


def allows(name: str, schema: Json, arguments: dict[str, Json]) -> bool:
    text = WRITERS[name]([("put", arguments)])
    tokens = [token for part in text.split(CUT) for token in encode(name, True, part)]
    state = begun(name, {"put": schema})
    if state.num_allowed(tokens) < len(tokens):
        return False
    for token in tokens:
        state.advance(token)
    return state.is_complete


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_would_write_is_allowed(name: str) -> None:
    """Also texts that look like the end of a call, and read again they are what was written."""
    for arguments in WRITTEN_CALLS:
        assert allows(name, PUT, arguments), arguments
        text = WRITERS[name]([("put", arguments)]).replace(CUT, "")
        for pieces in ([text], [*text]):
            [call] = read(name, {"put": PUT}, pieces).calls
            assert call.arguments == json.dumps(arguments, ensure_ascii=False).replace(CUT, "")
    for arguments in REFUSED_CALLS:
        assert not allows(name, PUT, arguments), arguments
    free = {"type": "object"}
    assert allows(name, free, {"Any_1": "thing"})
    assert allows(name, {"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1})
    assert not allows(name, {"type": "object", "properties": {}}, {"a": "1"})


REFUSED_SCHEMAS: list[tuple[Json, str]] = [
    ({"type": "object", "patternProperties": {"a": {}}}, '"patternProperties" at /'),
    ({"type": "object", "minProperties": 1}, '"minProperties" at /'),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "names 'b', which is not declared"),
    ({"type": "string"}, "is not one of an object"),
    ({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}, '"not" at /properties/a'),
    ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "if": {}}]}}}, '"if" at /properties/a/anyOf'),
    ({"type": "object", "properties": {"a": {"type": "string", "minLength": -1}}}, '"minLength" at .*no count'),
    ({"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 1}}}, "maxLength"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}, "which is not in the schema"),
    ({"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}}, '"oneOf"'),
    ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "refers to itself"),
    ({"type": "object", "properties": {"a": {"enum": ["\ud800"]}}}, "no Unicode"),
    ({"type": "object", "properties": {"a": False}}, "allows nothing"),
    ({"type": "object", "properties": 5}, "no object of properties"),
    ({"type": "object", "properties": {"a": {}}, "required": [[]]}, "which is not declared"),
    ({"type": "object", "properties": {"a": {"anyOf": []}}}, "allows nothing"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("schema", "why"), REFUSED_SCHEMAS)
def test_what_a_format_cannot_keep_is_refused_by_name(name: str, schema: Json, why: str) -> None:
    with pytest.raises(ConstraintFailed, match=why) as refusal:
        begun(name, {"put": schema})
    assert "the parameters of put" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "schema", "why"),
    [
        ("qwen3_coder", {"type": "object", "properties": {"a>b": {}}}, "cannot be written in a tag"),
        ("glm", {"type": "object", "properties": {" a": {}}}, "cannot be written in a tag"),
        ("glm", {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "anchors"),
        ("glm", {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "cannot be kept"),
        ("glm", {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(a)\1"}}}, "cannot be kept"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "format": "ipv6"}}}, "format: ipv6"),
        ("glm", {"type": "object", "properties": {"a{newline}": {}}}, "cannot be written in a tag"),
        ("glm", {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "no definition"),
        (
            "qwen3_coder",
            {"type": "object", "properties": {"a": {"items": {"$ref": "#/properties/a"}, "type": "array"}}},
            "no definition",
        ),
        ("pythonic", {"type": "object", "properties": {"from": {}}}, "no name in Python"),
        ("pythonic", {"type": "object", "properties": {"a": {"$ref": "#"}}}, "nested too deeply"),
        ("pythonic", {"type": "object", "properties": {"a": {"type": "integer", "minimum": "1"}}}, "no number"),
        ("pythonic", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ("pythonic", {"type": "object", "properties": {"a": {"enum": [float("inf")]}}}, "written in Python"),
    ],
)
def test_names_and_values_without_a_way_to_write_them_are_refused(name: str, schema: Json, why: str) -> None:
    with pytest.raises(ConstraintFailed, match=why):
        begun(name, {"put": schema})


def test_python_calls_need_names_of_python() -> None:
    for tool in ("get-weather", "1st", "class", "a.import"):
        with pytest.raises(ConstraintFailed, match="no name in Python"):
            begun("pythonic", {tool: {}})
