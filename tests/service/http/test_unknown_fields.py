"""Fields that nobody here knows are named to the client, and refused only where new requests come in."""

from __future__ import annotations

from typing import Any

import pytest

from baton.telemetry.metrics import REGISTRY
from tests.service.http.http_server import MODEL, error_of, router, says
from tests.unit.router.text.text_models import marked

STRANGE: dict[str, Any] = {"unheard_of": 1, "comma,": 2, "new\nline": 3, "é": 4, "x" * 100: 5}
NAMES = "unheard_of, comma?, new?line, ?, " + "x" * 64


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named_in_a_header(stream: bool):
    async with router(says("hello")) as world:
        reply = await world.chat(stream=stream, user="me", **STRANGE)
        assert (reply.status_code, reply.headers["x-baton-unknown-fields"]) == (200, NAMES)
        assert "x-baton-unknown-fields" not in (await world.chat(user="me")).headers
        others: dict[str, Any] = {f"f{number}": 1 for number in range(50)}
        many = await world.chat(**others)
        assert many.headers["x-baton-unknown-fields"].split(", ") == [f"f{number}" for number in range(10)]


INSIDE: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False, "often": 1, "off": None},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object"}, "loose": 1},
        "like": 5,
    },
    "messages": [
        {"role": "user", "content": "hello", "name": "me"},
        {"role": "assistant", "content": "so", "prefix": True, "audio": None, "annotations": []},
    ],
}
NAMES_INSIDE = "stream_options.often, response_format.json_schema.loose, response_format.like, messages.prefix"


async def test_unknown_names_inside_of_objects_and_messages_are_named():
    async with router(says("{}")) as world:
        reply = await world.chat(**INSIDE)
        assert (reply.status_code, reply.headers["x-baton-unknown-fields"]) == (200, NAMES_INSIDE)
        choice: dict[str, Any] = {"type": "function", "function": {"name": "add", "twice": True}, "also": 1}
        add = {"type": "function", "function": {"name": "add"}}
        called = await world.chat(tools=[add], tool_choice=choice)
        assert called.headers["x-baton-unknown-fields"] == "tool_choice.function.twice, tool_choice.also"
    async with router(says("{}"), strict_fields=True) as world:
        refused = await world.chat(**INSIDE)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "stream_options.often")


async def test_a_field_of_messages_that_the_template_reads_is_known():
    text = marked("{% for m in messages %}{{ m.mood }}{{ m.content }}{% endfor %}", [])
    async with router(says("x", text), text) as world:
        reply = await world.chat(messages=[{"role": "user", "content": "hello", "mood": "wild", "moods": 2}])
        assert reply.headers["x-baton-unknown-fields"] == "messages.moods"


PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "empty": None}]},
    {
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "no", "why": "x"}, {"type": "text", "text": "b", "annotations": []}],
        "tool_calls": [
            {
                "id": "call-1",
                "type": "function",
                "index": 0,
                "function": {"name": "add", "arguments": {"a": {"b": 1}}, "parsed": {"a": 1}},
                "extra_content": {"x": 1},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "3", "tool_reference": "x"}]},
]
NAMES_OF_PARTS = (
    "messages.content.cache_control, messages.content.tool_reference, messages.content.why, "
    "messages.tool_calls.extra_content, messages.tool_calls.function.parsed"
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"])
async def test_unknown_names_inside_parts_and_tool_calls_are_named(path: str):
    async with router(says("x")) as world:
        reply = await world.http.post(path, json={"model": MODEL, "messages": PARTS})
        assert (reply.status_code, reply.headers["x-baton-unknown-fields"]) == (200, NAMES_OF_PARTS)
    async with router(says("x"), strict_fields=True) as world:
        refused = await world.http.post(path, json={"model": MODEL, "messages": PARTS})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "messages.content.cache_control")


async def test_a_field_of_tool_calls_that_the_template_reads_is_known():
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.extra_content }}{% endfor %}"
    text = marked(f"{source}{{% endfor %}}", [])
    async with router(says("x", text), text) as world:
        reply = await world.chat(messages=PARTS)
        assert "extra_content" not in reply.headers["x-baton-unknown-fields"]
        assert "messages.content.why" in reply.headers["x-baton-unknown-fields"]  # a template gets the text alone


TAG: dict[str, Any] = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}] * 2, "triggers": ["<a>"]}
LOOSE_TAG = {**TAG, "structures": [{**each, "style": "x", "off": None} for each in TAG["structures"]]}


async def test_unknown_names_inside_structures_are_named():
    async with router(says("x")) as world:
        reply = await world.chat(response_format={"type": "structural_tag", **LOOSE_TAG})
        assert reply.headers["x-baton-unknown-fields"] == "response_format.structures.style"
        for tag, name in ((LOOSE_TAG, "structures.style"), ({**TAG, "stop_after_first": True}, "stop_after_first")):
            refused = await world.chat(structured_outputs={"structural_tag": tag})
            assert (refused.status_code, f"{name} is not supported" in error_of(refused)["message"]) == (400, True)
        assert (await world.chat(structured_outputs={"structural_tag": TAG})).status_code == 200


async def test_unknown_fields_are_counted_and_logged():
    async with router(says("hello")) as world:
        before = REGISTRY.get_sample_value("baton_unknown_fields_total") or 0.0
        await world.chat(unheard_of=1, other=2)
        assert REGISTRY.get_sample_value("baton_unknown_fields_total") == before + 2
        [logged] = [line for line in world.logs if line["event"] == "unknown_fields"]
        assert (logged["log_level"], logged["names"]) == ("debug", ["'unheard_of'", "'other'"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/chat/completions/render", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_requests_about_text_name_unknown_fields(path: str, body: dict[str, Any]):
    async with router(says("x")) as world:
        assert "x-baton-unknown-fields" not in (await world.http.post(path, json=body)).headers
        reply = await world.http.post(path, json={**body, "unheard_of": 1})
        assert (reply.status_code, reply.headers["x-baton-unknown-fields"]) == (200, "unheard_of")
    async with router(says("x"), strict_fields=True) as world:
        refused = await world.http.post(path, json={**body, "unheard_of": 1})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "unheard_of")


async def test_strict_fields_refuse_unknown_names():
    async with router(says("hello"), strict_fields=True) as world:
        reply = await world.chat(unheard_of=1)
        assert reply.status_code == 400
        assert (error_of(reply)["param"], "unheard_of" in error_of(reply)["message"]) == ("unheard_of", True)
        assert world.dispatcher.admitted == []
        assert (await world.chat(user="me", tools=None)).status_code == 200
