"""The shapes of requests that other projects' clients sent, replayed: every answer is as their SDK reads it.

`python -m tests.clients PYTHON --record tests/contract/clients` records them from real runs (docs/clients.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.services.router.edge.headers import UNKNOWN_FIELDS
from baton.services.router.generation import SequenceSpec, TokenChunk
from tests.fake_dispatcher import DispatchScript, EmitChunk, ScriptStep
from tests.service.http.http_server import RouterServer, events_of, router, tokens_of

SHAPES = Path(__file__).parent
CLIENTS = sorted(path.stem for path in SHAPES.glob("*.jsonl"))
ARGUMENTS = '{"city": "Oslo"}'
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"


def shapes(client: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHAPES / f"{client}.jsonl").read_text().splitlines()]


def expected_call(body: dict[str, Any]) -> str | None:
    """The name of the tool that the request forces."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    name: str = (body["tools"][0] if choice == "required" else choice)["function"]["name"]
    return name


def answering(body: dict[str, Any]) -> DispatchScript:
    """A model that does what the request asks for: the call, or a text. Each token has log probabilities."""
    name = expected_call(body)
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {ARGUMENTS}}}\n</tool_call>'
    tokens = tokens_of("Hello." if name is None else call)

    def script(sequence: SequenceSpec) -> list[ScriptStep]:
        assert sequence.constraint is not None or (name is None and "response_format" not in body)
        scored = TokenLogprobs(-0.5, ((5, -0.5), (6, -1.5)))
        logprobs = scored if body.get("logprobs") else None
        return [
            EmitChunk(TokenChunk((OutputToken(at, token, logprobs),), 0, FinishReason.STOP if token == 2 else None))
            for at, token in enumerate(tokens)
        ]

    return script


async def check_whole(world: RouterServer, path: str, body: dict[str, Any]) -> None:
    answer = await world.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert UNKNOWN_FIELDS not in answer.headers, answer.headers[UNKNOWN_FIELDS]
    if path == TOKENIZE:
        assert answer.json()["tokens"]
        return
    if path != CHAT:
        check_completion(answer.json(), body)
        return
    read = ChatCompletion.model_validate(answer.json())
    assert len(read.choices) == body.get("n", 1)
    calls = [call for choice in read.choices for call in choice.message.tool_calls or ()]
    assert [call.function.name for call in calls if call.type == "function"] == ([expected_call(body)] if calls else [])
    assert bool(calls) == (expected_call(body) is not None)
    assert calls or all(choice.message.content == "Hello." for choice in read.choices)


def check_completion(read: dict[str, Any], body: dict[str, Any]) -> None:
    if not body.get("echo"):
        assert Completion.model_validate(read).choices[0].text == "Hello."
        return
    assert len(read["choices"]) == len(body["prompt"])
    for choice, prompt in zip(read["choices"], body["prompt"], strict=True):
        assert choice["text"].endswith("Hello.")
        first, *scores = choice["logprobs"]["token_logprobs"]  # the SDK's own type does not allow the null of the first
        assert first is None
        assert len(scores) > len(prompt) - 1
        assert all(isinstance(score, float) for score in scores)


async def check_stream(world: RouterServer, path: str, body: dict[str, Any]) -> None:
    answer = await world.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    *events, done = events_of(answer.text)
    assert done == "[DONE]"
    read = [ChatCompletionChunk.model_validate(event) for event in events if path == CHAT]
    usage = [event["usage"] for event in events if event.get("usage") is not None]
    wanted = body.get("stream_options", {})
    assert bool(usage) == bool(wanted.get("include_usage"))
    assert len(usage) == (len(events) if wanted.get("continuous_usage_stats") else bool(usage))
    if path != CHAT:  # the SDK's own type does not allow the null of a choice that goes on
        assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == "Hello."
        return
    deltas = [chunk.choices[0].delta for chunk in read if chunk.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
    assert "".join(call.name or "" for call in calls) == (expected_call(body) or "")
    assert "".join(call.arguments or "" for call in calls) == (ARGUMENTS if expected_call(body) else "")


@pytest.mark.parametrize("client", CLIENTS)
async def test_what_clients_send_is_answered_as_they_read_it(client: str) -> None:
    all_shapes = shapes(client)
    first = next(shape["body"] for shape in all_shapes if shape["path"] != TOKENIZE)
    async with router(answering(first), model_name=first["model"], max_model_len=4096) as world:
        for shape in all_shapes:
            body = shape["body"]
            world.dispatcher.script = answering(body)
            await (check_stream if body.get("stream") else check_whole)(world, shape["path"], body)


def test_shapes_of_each_client_are_here() -> None:
    """A run of one client alone must not leave the others out."""
    assert CLIENTS == ["agents", "aiperf", "guidellm", "instructor", "langchain", "litellm", "lm_eval"]
    assert all(shapes(client) for client in CLIENTS)
    assert {shape["path"] for client in CLIENTS for shape in shapes(client)} == {CHAT, "/v1/completions", TOKENIZE}
