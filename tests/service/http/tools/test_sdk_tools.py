"""The openai SDK reads calls, reasoning and forms: whole, streamed, and by its own helpers."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from baton.domain.request import FinishReason
from baton.services.router.generation import TokenChunk
from tests.fake_dispatcher import EmitChunk
from tests.service.http.http_server import MODEL, router, says, tokens_of
from tests.unit.router.text.text_models import marked

TEXT = marked(
    "{{ tools }}{# <tool_call><think> #}{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{{ m.tool_calls }}{% endfor %}[assistant]",
    ["<think>", "</think>", "<tool_call>", "</tool_call>"],
)
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARAMETERS["additionalProperties"] = False
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
THOUGHT = "<think>It asks for Oslo.</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Weather(BaseModel):
    """The form of an answer."""

    city: str
    degrees: int


async def test_a_call_comes_back_as_history():
    async with router(says(f"{THOUGHT}I will look.\n{CALL}", TEXT), TEXT, max_model_len=1024) as world:
        create = world.openai.chat.completions.create
        first = await create(model=MODEL, messages=HELLO, tools=[TOOL])
        [choice] = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I will look."
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"] == "It asks for Oslo."
        assert first.usage is not None
        assert first.usage.completion_tokens_details is not None
        assert first.usage.completion_tokens_details.reasoning_tokens
        answer = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"}
        history: Any = [*HELLO, choice.message.model_dump(exclude_none=True), answer]
        assert (await create(model=MODEL, messages=history, tools=[TOOL])).choices


async def test_the_stream_helper_collects_what_the_whole_answer_has():
    async with router(says(f"{THOUGHT}{CALL}", TEXT), TEXT) as world:
        whole = await world.openai.chat.completions.create(model=MODEL, messages=HELLO, tools=[TOOL])
        async with world.openai.chat.completions.stream(model=MODEL, messages=HELLO, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        [streamed], [expected] = final.choices[0].message.tool_calls or [], whole.choices[0].message.tool_calls or []
        assert streamed.function.arguments == expected.function.arguments  # type: ignore[union-attr]
        assert streamed.id[:5] == expected.id[:5] == "call_"
        assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"


async def test_raw_chunks_have_reasoning_then_the_call():
    async with router(says(f"{THOUGHT}{CALL}", TEXT), TEXT) as world:
        stream = await world.openai.chat.completions.create(model=MODEL, messages=HELLO, tools=[TOOL], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        reasoning = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
        assert "".join(reasoning) == "It asks for Oslo."
        first, *more = [part for delta in deltas for part in delta.tool_calls or []]
        assert (first.index, first.type, first.function and first.function.name) == (0, "function", "weather")
        assert first.id
        assert len(more) > 1, "arguments come while they are written: the marker's token has begun a constraint"
        assert all((part.index, part.id, part.type) == (0, None, None) for part in more)
        assert all(part.function and part.function.name is None for part in more)
        arguments = [part.function.arguments for part in (first, *more) if part.function]
        assert all(arguments)
        assert "".join(part or "" for part in arguments) == '{"city": "Oslo"}'
        assert not "".join(delta.content or "" for delta in deltas)


async def test_a_call_that_is_cut_ends_with_length():
    """Whole and streamed: as at OpenAI, with the arguments so far."""
    async with router(says(f"{THOUGHT}{CALL}", TEXT), TEXT) as world:
        num_tokens = len(tokens_of(f"{THOUGHT}{CALL[: CALL.index('Oslo') + 2]}", model=TEXT))
        fields: Any = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
        script = world.dispatcher.script

        def cut(sequence: Any) -> Any:
            steps = list(script(sequence))[: num_tokens - 1]
            chunk = steps[-1].chunk  # type: ignore[union-attr]
            return [*steps[:-1], EmitChunk(TokenChunk(chunk.tokens, 0, FinishReason.LENGTH))]

        world.dispatcher.script = cut
        [choice] = (await world.openai.chat.completions.create(**fields)).choices
        assert choice.finish_reason == "length"
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert '{"city": "Oslo"}'.startswith(call.function.arguments)
        assert call.function.arguments.startswith('{"city')
        stream = await world.openai.chat.completions.create(**fields, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        parts = [part.function for chunk in chunks for part in chunk.delta.tool_calls or []]
        assert "".join(part.arguments or "" for part in parts if part) == call.function.arguments
        assert chunks[-1].finish_reason == "length"


async def test_a_form_is_parsed_after_the_reasoning():
    async with router(says(f'{THOUGHT.strip()}{{"city": "Oslo", "degrees": 4}}', TEXT), TEXT) as world:
        parse = world.openai.chat.completions.parse
        parsed = await parse(model=MODEL, messages=HELLO, response_format=Weather, reasoning_effort="none")
        assert parsed.choices[0].message.parsed == Weather(city="Oslo", degrees=4)


async def test_a_refusal_names_its_field():
    async with router(says("x", TEXT), TEXT) as world:
        with pytest.raises(openai.BadRequestError) as refusal:
            await world.openai.chat.completions.create(model=MODEL, messages=HELLO, reasoning_effort="high")
        assert refusal.value.param == "reasoning_effort"
