"""Tool calls over HTTP: whole and streamed alike, constrained where asked, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.domain.constraint import GrammarPhase
from baton.services.router.text.parsers.registry import TOOL_FORMATS
from tests.fake_dispatcher import one_token_chunks
from tests.service.http.http_server import MODEL, events_of, router, says, tokens_of
from tests.unit.router.text.test_tool_formats import WRITERS
from tests.unit.router.text.text_models import marked

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
TOOLS = [ADD, {"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def merged(events: list[Any]) -> tuple[str, list[tuple[int, str, str, str]], str | None]:
    """Text, calls and finish reason of a stream."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    found = [(call["index"], call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(choice["delta"].get("content") or "" for choice in choices), found, choices[-1]["finish_reason"]


@pytest.mark.parametrize(
    ("said", "text", "names", "finish"),
    [
        (CALL, None, ["add"], "tool_calls"),
        (f"I will add.\n{CALL}\n{NOW}", "I will add.", ["add", "now"], "tool_calls"),
        ("no call", "no call", [], "stop"),
        (CALL.replace("add", "delete"), CALL.replace("add", "delete"), [], "stop"),
        (CALL[:-14], CALL[:-14], [], "stop"),
    ],
)
async def test_calls_are_the_same_whole_and_streamed(said: str, text: str | None, names: list[str], finish: str):
    async with router(says(said)) as world:
        [choice] = (await world.chat(tools=TOOLS)).json()["choices"]
        message, streamed = choice["message"], merged(events_of((await world.chat(tools=TOOLS, stream=True)).text)[:-1])
        assert (message["content"], choice["finish_reason"]) == (text, finish)
        assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names
        assert streamed[0] == (text or "")
        assert [call[2] for call in streamed[1]] == names
        assert [call[0] for call in streamed[1]] == list(range(len(names)))
        assert streamed[2] == finish
        assert len({call[1] for call in streamed[1]}) == len(names)


async def test_without_parallel_calls_the_first_ends_the_answer():
    async with router(says(f"{CALL}{NOW} and more")) as world:
        [choice] = (await world.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
        assert choice["finish_reason"] == "tool_calls"


def strict(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "put", "parameters": parameters, "strict": True}}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "pythonic"])
async def test_strict_calls_without_json_are_constrained(name: str):
    """`auto`, `required` and a name; whole and streamed alike; what cannot be kept is a 400 that names it."""
    text = marked(f"{{{{ tools }}}}{{# {' '.join(TOOL_FORMATS[name].signatures[-1])} #}}", TOOL_FORMATS[name].markers)
    arguments = {"text": "a <b>\n", "count": 2, "tags": ["x"]}
    tags = {"type": "array", "items": {"type": "string"}}
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "tags": tags}}
    said, seen = tokens_of(WRITERS[name]([("put", arguments)]), model=text), []

    def script(sequence: Any) -> Any:
        seen.append(sequence.constraint)
        return one_token_chunks(said)

    named = {"type": "function", "function": {"name": "put"}}
    async with router(script, text) as world:
        for choice in ("auto", "required", named):
            fields: dict[str, Any] = {"tools": [strict(schema)], "tool_choice": choice}
            [whole] = (await world.chat(**fields)).json()["choices"]
            streamed = merged(events_of((await world.chat(**fields, stream=True)).text)[:-1])
            [call] = whole["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == arguments
            assert [(part[0], *part[2:]) for part in streamed[1]] == [(0, "put", call["function"]["arguments"])]
            assert (streamed[0], streamed[2]) == ("", whole["finish_reason"])
        assert all(constraint is not None for constraint in seen)
        refused = await world.chat(tools=[strict({**schema, "patternProperties": {"x": {}}})])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        assert '"patternProperties" at /' in refused.json()["error"]["message"]


async def test_a_strict_call_that_no_constraint_has_held_is_text():
    """The marker spelled as text, or the second one of a format, begins no constraint."""
    text = marked("{{ tools }}<function=", TOOL_FORMATS["qwen3_coder"].markers[:1])
    said = "<function=put>\n<parameter=a>\n1\n</parameter>\n</function>"
    async with router(says(said, text), text) as world:
        for is_strict, names in ((True, []), (False, ["put"])):
            tool = {"type": "function", "function": {**strict({"type": "object"})["function"], "strict": is_strict}}
            [choice] = (await world.chat(tools=[tool])).json()["choices"]
            assert [call["function"]["name"] for call in choice["message"].get("tool_calls", [])] == names
            assert choice["message"]["content"] == (said if is_strict else None)


async def test_required_and_named_calls_are_constrained():
    seen = []

    def script(sequence: Any) -> Any:
        seen.append(sequence)
        return one_token_chunks(tokens_of(CALL))

    async with router(script) as world:
        named = {"type": "function", "function": {"name": "add"}}
        for choice in ("required", named, "auto", "none"):
            answer = await world.chat(tools=TOOLS, tool_choice=choice)
            assert answer.status_code == 200
            expected = {"required": "tool_calls", "auto": "tool_calls"}.get(str(choice), "stop")
            assert answer.json()["choices"][0]["finish_reason"] == expected
    required, one, auto, none = [sequence.constraint for sequence in seen]
    assert isinstance(required.phases[0], GrammarPhase)
    assert required != one
    assert (auto, none) == (None, None)
    assert len(seen[3].prompt_tokens) < len(seen[2].prompt_tokens), "tool_choice none leaves the tools out"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_what_cannot_be_kept_is_refused(fields: dict[str, Any], param: str):
    async with router(says("x")) as world:
        answer = await world.chat(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert not world.dispatcher.admitted


async def test_history_with_calls_is_rendered():
    messages = [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    async with router(says("two")) as world:
        body = {"model": MODEL, "messages": messages, "tools": [ADD]}
        rendered = await world.http.post("/v1/chat/completions/render", json=body)
        assert rendered.status_code == 200, rendered.text
        prompt = rendered.json()["prompt"]
        assert '{"name": "add", "arguments": {"a": 1}}' in prompt
        assert json.dumps(ADD) in prompt
        assert (await world.chat(messages=messages, tools=[ADD])).json()["choices"][0]["message"]["content"] == "two"
