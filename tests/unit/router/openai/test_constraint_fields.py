"""Values of `response_format` and `structured_outputs` that are read, and those that are refused by name."""

import json

import pytest

from baton.domain.errors import InvalidRequest
from tests.unit.router.openai.test_validation import chat

TAG = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        (
            "response_format",
            [
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_object", "schema": {"type": "object"}},
                {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}},
                {"type": "structural_tag", **TAG},
            ],
            [
                {"type": "json_schema"},
                {"type": "json_schema", "json_schema": {}},
                {"type": "json_schema", "json_schema": {"schema": "text"}},
                {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
                {"type": "structural_tag"},
                {"type": "json_object", "schema": "text"},
                {"type": "json_object", "json_schema": {"schema": {}}},
                {"type": "text", "schema": {}},
                {"type": "text", "json_schema": {}},
                {"type": "structural_tag", **TAG, "schema": {}},
                {"type": "x"},
                "text",
                {},
            ],
        ),
        (
            "structured_outputs",
            [
                {"regex": "a"},
                {"json": {"type": "object"}, "disable_any_whitespace": True},
                {"json": "{}"},
                {"json_object": True, "regex": None, "disable_fallback": False},
                {"choice": ["a", "b"]},
                {"grammar": 'start: "a"'},
                {"structural_tag": TAG},
                {"structural_tag": json.dumps(TAG)},
            ],
            [
                {},
                {"regex": "a", "choice": ["a"]},
                {"regex": ""},
                {"regex": 5},
                {"choice": []},
                {"choice": "ab"},
                {"json": "{"},
                {"json": 5},
                {"structural_tag": "x", "regex": "a"},
                {"structural_tag": "x"},
                {"structural_tag": {**TAG, "structures": []}},
                {"structural_tag": {**TAG, "structures": ["x"]}},
                {"structural_tag": {**TAG, "triggers": ["no"]}},
                {"structural_tag": {**TAG, "triggers": [""]}},
                {"structural_tag": {**TAG, "structures": [{"begin": "<f>", "schema": 5}]}},
                {"regex": "a", "whitespace_pattern": 3},
                "regex",
            ],
        ),
    ],
)
def test_values(field: str, good: list, bad: list):
    for value in good:
        call = chat(**{field: value})
        assert (call.constraint is None) == (value == {"type": "text"})
        assert call.sequences[0].constraint == (None if call.constraint is None else call.constraint.value)
    for value in bad:
        with pytest.raises(InvalidRequest) as refusal:
            chat(**{field: value})
        assert (refusal.value.param or "").startswith(field)


def test_a_schema_of_an_object_is_kept():
    """As llama-server has it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wrapped = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert (
        chat(response_format={"type": "json_object", "schema": schema}).constraint
        == chat(response_format=wrapped).constraint
        != chat(response_format={"type": "json_object", "schema": None}).constraint
        == chat(response_format={"type": "json_object"}).constraint
    )
