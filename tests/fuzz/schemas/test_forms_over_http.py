"""Damaged grammars, regular expressions, schemas, tags and tools over HTTP: answered or refused by name, never a 5xx.

`BATON_FORMS` changes the number of requests.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.http_app import MODEL, FuzzedApp
from tests.unit.router.text.text_models import marked

NUM_FORMS = int(os.environ.get("BATON_FORMS", "250"))
MARKERS = ["<tool_call>", "</tool_call>"]
TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> #}"
GRAMMARS = (
    'root ::= "a" | b\nb ::= [a-z]+ "x"?\n',
    'root ::= (a "," )* a{2,5}\na ::= [^\\n"]\n# c\n',
    'root ::= object\nobject ::= "{" ( string ":" object )? "}"\nstring ::= "\\"" [^"\\\\]* "\\""\n',
    'start: a | B\na: "x" B+\nB: /[a-z]+/\n',
    'start: "a"\n%ignore / +/\n',
    'start: %json {"type": "object"}\n',
)
PATTERNS = ("(a|b)*c{2,5}", r"[^a-z]\d+\w*", r"(?i)abc|\p{L}+", "^x$", ".+é?")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 1},
            "b": {"type": "array", "items": {"type": "string", "pattern": "a+"}, "maxItems": 3},
        },
        "required": ["a"],
    },
    {"anyOf": [{"const": 1}, {"enum": ["a", None]}]},
    {"$defs": {"x": {"type": "number", "multipleOf": 0.5}}, "$ref": "#/$defs/x"},
    {"type": ["string", "null"], "format": "date", "minLength": 2},
    {"type": "object", "patternProperties": {"^a": {"type": "boolean"}}, "minProperties": 1},
)
WRONG: tuple[Any, ...] = (
    None, True, -1, 1e300, "", "x", [], {}, [None], {"type": 5}, "é🦊", 2**70, "\x00", {"$ref": "#"}, {"$ref": "#/a"},
)  # fmt: skip
KEYWORDS = (
    "type", "properties", "items", "required", "enum", "const", "anyOf", "oneOf", "allOf", "not", "minimum",
    "maxLength", "pattern", "format", "minItems", "prefixItems", "additionalProperties", "patternProperties",
    "$ref", "$defs", "$schema", "$id", "title", "default", "x-guidance", "dependentRequired", "if",
)  # fmt: skip
PIECES = (
    *"'\"()[]{}|*+?:=\\/#~,.-^$ \n\tax0<>@%é\x00", "::=", "root", "start", "{2,1}", "{99999999999}", "(?", "\\x", "no",
)  # fmt: skip
Draw = random.Random


def damaged(draw: Draw, text: str) -> str:
    """The text with up to three characters or pieces put in, taken out or changed."""
    parts = list(text)
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(parts) + 1)
        parts[at : at + draw.randint(0, 1)] = draw.choice([[draw.choice(PIECES)], []])
    return "".join(parts)


def damaged_schema(draw: Draw, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with up to three wrong values, or other schemas, at keywords anywhere in it."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    places: list[Any] = [copy]
    for place in places:
        inner = place.values() if isinstance(place, dict) else place
        places.extend(value for value in inner if isinstance(value, dict | list))
    for _ in range(draw.randint(0, 3)):
        place = draw.choice(places)
        if isinstance(place, dict):
            place[draw.choice([*KEYWORDS, *place])] = draw.choice([*WRONG, *SCHEMAS])
        elif place:
            place[draw.randrange(len(place))] = draw.choice(WRONG)
    return copy


def tools(draw: Draw) -> dict[str, Any]:
    parameters = damaged_schema(draw, SCHEMAS[0])
    function = {"name": "a", "strict": draw.random() < 0.5, "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": draw.choice(["auto", "required"])}


def tag(draw: Draw) -> dict[str, Any]:
    schema = damaged_schema(draw, draw.choice(SCHEMAS))
    structure = {"begin": damaged(draw, "<tool_call>"), "schema": schema, "end": damaged(draw, "</x>")}
    return {"structures": [structure], "triggers": [damaged(draw, "<tool_")]}


FORMS: tuple[Callable[[Draw], dict[str, Any]], ...] = (
    lambda draw: {"guided_grammar": damaged(draw, draw.choice(GRAMMARS))},
    lambda draw: {"guided_regex": damaged(draw, draw.choice(PATTERNS))},
    lambda draw: {"guided_json": {"type": "object"}, "guided_whitespace_pattern": damaged(draw, draw.choice(PATTERNS))},
    lambda draw: {"guided_choice": [damaged(draw, "abc"), draw.choice(["a", "b", ""])]},
    lambda draw: {"structured_outputs": {"json": damaged_schema(draw, draw.choice(SCHEMAS))}},
    lambda draw: {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": damaged_schema(draw, draw.choice(SCHEMAS))},
        }
    },
    lambda draw: {"response_format": {"type": "structural_tag", **tag(draw)}},
    tools,
)


@pytest.mark.timeout(300)
def test_damaged_forms_are_answered_or_refused_by_name() -> None:
    app = FuzzedApp(marked(TEMPLATE, MARKERS), max_model_len=4096)
    outcomes: Counter[tuple[int, int]] = Counter()
    try:
        for seed in range(NUM_FORMS):
            draw, kind = Draw(f"form/{seed}"), seed % len(FORMS)
            fields = FORMS[kind](draw)
            messages = [{"role": "user", "content": "hi"}]
            reply = app.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})  # no 5xx
            outcomes[kind, reply.status] += 1
            if reply.status != 200:
                param = reply.error["param"]
                assert (reply.status, param.split(".")[0].split("[")[0] in fields) == (400, True), (seed, reply.error)
    finally:
        app.close()
    assert all(outcomes[kind, status] for kind in range(len(FORMS)) for status in (200, 400)), outcomes
