"""References in the schemas of tools whose calls are tags or Python: where they lead, and that following them ends."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from baton.domain.errors import ConstraintFailed
from tests.unit.router.openai.test_written_arguments import NAMES, begun, read
from tests.unit.router.text.test_tool_formats import WRITERS

Json = Any


@pytest.mark.parametrize("name", NAMES)
def test_references_that_fan_out_end(name: str) -> None:
    """Each definition names the next one twice: written out they would be a million."""
    definitions: Json = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)}
    definitions["d20"] = {"type": "string"}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    with pytest.raises(ConstraintFailed, match="alternatives"):
        begun(name, {"put": schema})
    [call] = read(name, {"put": schema}, [WRITERS[name]([("put", {"a": "x"})])]).calls
    assert json.loads(call.arguments) == {"a": "x"}
    wide = {f"d{i}": objects_of(f"d{i + 1}") for i in range(12)} | {"d12": {"type": "integer"}}
    begun(name, {"put": {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": wide}})


@pytest.mark.parametrize("name", NAMES)
def test_references_that_fan_out_to_nothing_end(name: str) -> None:
    """Alternatives that end in none would be walked whole: a few hundred bytes, and billions of steps."""
    definitions: Json = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(30)}
    leaves: list[Json] = [{"anyOf": []}, {"oneOf": []}]
    for leaf in leaves:
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**definitions, "d30": leaf}}
        with pytest.raises(ConstraintFailed, match="allows nothing"):
            begun(name, {"put": schema})


@pytest.mark.parametrize("name", NAMES)
def test_a_format_that_is_no_text_is_no_failure(name: str) -> None:
    forms: list[Json] = [[], {}, 3]
    for form in forms:
        with contextlib.suppress(ConstraintFailed):
            begun(name, {"put": {"type": "object", "properties": {"a": {"type": "string", "format": form}}}})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_a_reference_at_the_top_leads_to_the_types_of_the_arguments(name: str) -> None:
    """As tools write it that name every schema."""
    arguments = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = {"$ref": "#/definitions/Args", "definitions": {"Args": arguments}}
    begun(name, {"put": schema})
    [call] = read(name, {"put": schema}, [WRITERS[name]([("put", {"n": 5})])]).calls
    assert json.loads(call.arguments) == {"n": 5}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_parameters_carry_the_definitions_that_they_reach(name: str) -> None:
    """All of them for each parameter would be a grammar of megabytes, and a refusal."""
    unused = {f"u{i}": {"type": "string", "description": "x" * 1000} for i in range(100)}
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(50)} | {"q": {"$ref": "#/$defs/a"}},
        "$defs": unused | {"a": {"type": "array", "items": {"$ref": "#/$defs/b~1c"}}, "b/c": {"type": "integer"}},
    }
    begun(name, {"put": schema})
    [call] = read(name, {"put": schema}, [WRITERS[name]([("put", {"q": [1, 2]})])]).calls
    assert json.loads(call.arguments) == {"q": [1, 2]}


def objects_of(reference: str) -> Json:
    return {"type": "object", "properties": {key: {"$ref": f"#/$defs/{reference}"} for key in ("x", "y")}}
