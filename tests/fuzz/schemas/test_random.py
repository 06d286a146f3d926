"""Random JSON schemas: each is refused before a row is sampled, or every text that a walk completes validates.

The keywords are those of the JSON Schema Test Suite, also the ones that no grammar can express. `test_suite.py` plays
the suite itself.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import jsonschema_rs

from baton.domain.errors import ConstraintFailed
from baton.grammar import sources
from tests import grammars

NUM_SCHEMAS, NUM_WALKS, MAX_TOKENS, MAX_DEPTH = 240, 2, 100, 3
NAMES = ("a", "b", "c d", "é")
VALUES: tuple[Any, ...] = (None, True, False, 0, 1, -3, 1.5, "", "a", "é🦊", [], [1], {}, {"a": 1})
PATTERNS = ("^a+$", "^[0-9]{2}-x$", "^(red|blue)$", "(?=a)b")
MAX_FLOAT = sys.float_info.max
COMMON, RARE = 0.4, 0.04
"""The share of schemas that have a keyword. Rare ones are mostly refused."""
Draw = random.Random


def scalar(draw: Draw) -> Any:
    kind = draw.choice(("const", "enum", "string", "string", "integer", "integer", "number", "boolean", "null", "$ref"))
    match kind:
        case "const":
            return {"const": draw.choice(VALUES)}
        case "enum":
            return {"enum": draw.sample(VALUES, draw.randint(1, 3))}
        case "string":
            some = {
                "minLength": draw.randint(0, 3),
                "maxLength": draw.randint(0, 6),
                "pattern": draw.choice(PATTERNS),
                "format": draw.choice(("date", "uuid", "ipv4", "unheard-of")),
            }
        case "integer":
            some = {
                "minimum": draw.randint(-5, 5),
                "maximum": draw.randint(-5, 99),
                "multipleOf": draw.choice((1, 2, 5)),
            }
        case "number":
            some = {"exclusiveMinimum": draw.randint(-5, 5), "maximum": draw.choice((2, 7.5))}
        case "$ref":
            return {"$ref": "#/$defs/one"}
        case _:
            some = {}
    return {"type": kind, **some_of(draw, some, COMMON)}


def schema_of(draw: Draw, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.3:
        return scalar(draw)
    inner = [schema_of(draw, depth - 1) for _ in range(3)]
    kind = draw.choice(("array", "array", "object", "object", "object", "combined"))
    if kind == "array":
        common = {
            "items": inner[0],
            "prefixItems": inner[1:],
            "minItems": draw.randint(0, 2),
            "maxItems": draw.randint(0, 4),
        }
        rare = {"uniqueItems": True, "contains": inner[1]}
    elif kind == "object":
        common = {
            "properties": dict(zip(draw.sample(NAMES, 3), inner, strict=True)),
            "required": draw.sample(NAMES, draw.randint(0, 2)),
            "additionalProperties": draw.choice((False, inner[0])),
        }
        rare = {
            "patternProperties": {draw.choice(("^a", "b$")): inner[1]},
            "minProperties": draw.randint(0, 2),
            "maxProperties": draw.randint(0, 3),
            "propertyNames": inner[2],
            "dependentRequired": {"a": ["b"]},
        }
    else:
        word = draw.choice(("anyOf", "anyOf", "oneOf", "allOf"))
        return {word: inner[: draw.randint(1, 3)], **some_of(draw, {"not": inner[2], "if": inner[0]}, RARE)}
    return {"type": kind, **some_of(draw, common, 0.8), **some_of(draw, rare, RARE)}


def some_of(draw: Draw, keywords: dict[str, Any], share: float) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if draw.random() < share}


def finite(number: str) -> float:
    """A number of a text, which may be beyond Python's."""
    return max(min(float(number), MAX_FLOAT), -MAX_FLOAT)


def test_texts_of_random_schemas_validate() -> None:
    num_texts = num_refused = 0
    for seed in range(NUM_SCHEMAS):
        draw = Draw(seed)
        schema = {**schema_of(draw, MAX_DEPTH), "$defs": {"one": scalar(draw)}}
        try:
            constraint = grammars.constraint(sources.json_schema_grammar(schema))
            grammars.compiler().check(constraint)
        except ConstraintFailed:
            num_refused += 1
            continue
        for walk in range(NUM_WALKS):
            text = grammars.random_text(constraint, walk, MAX_TOKENS)
            if text is not None:
                num_texts += 1
                assert jsonschema_rs.is_valid(schema, json.loads(text, parse_float=finite)), (schema, text)
    assert num_texts > NUM_SCHEMAS // 2
    assert 0 < num_refused < NUM_SCHEMAS // 2, num_refused
