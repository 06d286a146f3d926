"""The older form of tools over HTTP, as older clients send and read it: `functions` and `function_call`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.http.http_server import MODEL, error_of, events_of, router, says
from tests.unit.router.text.text_models import marked

TEXT = marked(
    "{{ tools }}{# <tool_call> #}{% for m in messages %}[{{ m.role }} {{ m.name }} {{ m.tool_call_id }}]"
    "{{ m.content }}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% for c in m.tool_calls %}"
    "<{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}{% endif %}{% endfor %}[assistant]",
    ["<tool_call>", "</tool_call>"],
)
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
NOW: Any = {"name": "now", "parameters": {"type": "object", "properties": {}}}
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.mark.parametrize(
    ("said", "choice", "text", "called", "finish"),
    [
        (f"I will look.\n{CALL}{CALL} and so on", "auto", "I will look.", True, "function_call"),
        (CALL, {"name": "weather"}, None, True, "stop"),
        ("It rains.", "auto", "It rains.", False, "stop"),
        (CALL, "none", CALL, False, "stop"),
    ],
)
async def test_a_call_is_a_function_call_whole_and_streamed(
    said: str, choice: Any, text: str | None, called: bool, finish: str
):
    async with router(says(said, TEXT), TEXT, max_model_len=1024) as world:
        create = world.openai.chat.completions.create
        asked: Any = {"model": MODEL, "messages": HELLO, "functions": [WEATHER, NOW], "function_call": choice}
        [whole] = (await create(**asked)).choices
        assert (whole.message.content, whole.finish_reason) == (text, finish)
        assert whole.message.tool_calls is None
        call = whole.message.function_call
        assert (call and (call.name, call.arguments)) == (("weather", ARGUMENTS) if called else None)
        chunks = [chunk.choices[0] async for chunk in await create(**asked, stream=True)]
        parts = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call is not None]
        assert not any(chunk.delta.tool_calls for chunk in chunks)
        assert "".join(chunk.delta.content or "" for chunk in chunks) == (text or "")
        assert [part.name for part in parts if part.name] == (["weather"] if called else [])
        assert "".join(part.arguments or "" for part in parts) == (ARGUMENTS if called else "")
        assert chunks[-1].finish_reason == finish


async def test_functions_ask_for_what_tools_ask_for():
    tools = [{"type": "function", "function": each} for each in (WEATHER, NOW)]
    named = {"type": "function", "function": {"name": "now"}}
    async with router(says(CALL, TEXT), TEXT, max_model_len=1024) as world:
        cases: list[Any] = [({}, {}), ({"function_call": {"name": "now"}}, {"tool_choice": named})]
        for older, newer in cases:
            await world.chat(messages=HELLO, functions=[WEATHER, NOW], seed=1, **older)
            await world.chat(messages=HELLO, tools=tools, parallel_tool_calls=False, seed=1, **newer)
            first, second = world.dispatcher.admitted[-2:]
            assert first.prompt_tokens == second.prompt_tokens
            assert first.constraint is not None
            assert first.constraint == second.constraint
        body = {"model": MODEL, "messages": HELLO, "functions": [WEATHER]}
        for path in ("/tokenize", "/v1/chat/completions/render"):
            reply = (await world.http.post(path, json=body)).json()
            assert "weather" in TEXT.decode(reply.get("tokens") or reply["token_ids"], skip_special_tokens=False)


async def test_calls_and_answers_of_the_older_form_are_history():
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": ARGUMENTS}},
        {"role": "function", "name": "weather", "content": "4 degrees"},
        {"role": "assistant", "content": "Cold.", "function_call": None, "tool_calls": None},
        {"role": "assistant", "content": "Very.", "tool_calls": []},
    ]
    async with router(says("Yes.", TEXT), TEXT, max_model_len=1024) as world:
        body = {"model": MODEL, "messages": history}
        rendered = await world.http.post("/v1/chat/completions/render", json=body)
        prompt = rendered.json()["prompt"]
        assert (
            "1<call00001 weather Oslo>[tool weather call00001]4 degrees[assistant  ]Cold.[assistant  ]Very." in prompt
        )
        assert "x-baton-unknown-fields" not in rendered.headers
        history[1]["function_call"]["parsed"] = {"city": "Oslo"}
        reply = await world.chat(messages=history)
        assert reply.headers["x-baton-unknown-fields"] == "messages.function_call.parsed"


async def test_a_function_answers_the_last_call_of_either_form():
    newer = {"id": "call_new", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history: Any = [
        *HELLO,
        {"role": "function", "name": "early", "content": "before any call"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": ARGUMENTS}},
        {"role": "function", "name": "weather", "content": "4 degrees", "tool_call_id": None},
        {"role": "assistant", "content": None, "tool_calls": [newer]},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    async with router(says("Yes.", TEXT), TEXT, max_model_len=1024) as world:
        rendered = await world.http.post("/v1/chat/completions/render", json={"model": MODEL, "messages": history})
        prompt = rendered.json()["prompt"]
        assert "[tool early ]before any call" in prompt
        assert "[tool weather call00002]4 degrees" in prompt
        assert "[tool now call_new]noon" in prompt


TOOL = {"type": "function", "function": {"name": "add"}}
NOW_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": ["object", "null"]}}}
LIST_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": ["array", "null"]}}}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("sent", "param", "says_why"),
    [
        ({"functions": []}, "functions", "a list of 1 to 128 functions"),
        ({"functions": [WEATHER, {"name": "no spaces"}]}, "functions[1]", "must be a function"),
        ({"functions": [NOW, NOW]}, "functions", "must have different names"),
        ({"functions": [{"name": "f", "parameters": {"type": "array"}}]}, "functions[0].parameters", "of an object"),
        ({"tools": [NOW_TOOL, LIST_TOOL], "tool_choice": "required"}, "tools[1].function.parameters", "of an object"),
        ({"functions": [NOW], "tools": [TOOL]}, "functions", "cannot be combined with tools"),
        ({"functions": [NOW], "tool_choice": "auto"}, "functions", "cannot be combined with tool_choice"),
        ({"function_call": "auto"}, "function_call", "needs functions"),
        ({"function_call": {"name": "now"}, "tools": [TOOL]}, "function_call", "cannot be combined with tools"),
        ({"functions": [NOW], "function_call": {"name": "later"}}, "function_call", "names no tool"),
        ({"functions": [NOW], "function_call": "required"}, "function_call", "must be none, auto or"),
        (
            {"functions": [{"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}]},
            "functions",
            "not",
        ),
        ({"messages": [{**ASSISTANT, "function_call": {"name": "f"}}]}, "messages[0].function_call", "a call such as"),
        (
            {"messages": [{**HELLO[0], "function_call": {"name": "f", "arguments": ""}}]},
            "messages[0].function_call",
            "assistant only",
        ),
        (
            {
                "messages": [
                    {
                        **ASSISTANT,
                        "function_call": {"name": "f", "arguments": "{}"},
                        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].function_call",
            "cannot be combined with tool_calls",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id", "a string"),
        ({"messages": [{"role": "user", "content": "x", "name": {}}]}, "messages[0].name", "a string"),
    ],
)
async def test_what_is_wrong_has_the_name_that_was_sent(sent: dict[str, Any], param: str, says_why: str):
    async with router(says("x", TEXT), TEXT, max_model_len=1024) as world:
        reply = await world.chat(**{"messages": HELLO, **sent})
        assert (reply.status_code, error_of(reply)["param"]) == (400, param), error_of(reply)
        assert says_why in error_of(reply)["message"]


async def test_the_older_choice_of_nothing_is_nothing():
    async with router(says("x", TEXT), TEXT) as world:
        reply = await world.chat(function_call="none", functions=None, stream=True)
        assert reply.status_code == 200
        assert "function_call" not in str(events_of(reply.text))
