"""/tokenize, /detokenize and /v1/chat/completions/render say what the router would send to workers."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from baton.services.router.openai.request_schemas import tokenize_schema
from tests.service.http.http_server import MODEL, error_of, router, says
from tests.unit.router.text.text_models import bundled

MESSAGES = [{"role": "user", "content": "Grüße 🦊"}]
RENDER = "/v1/chat/completions/render"


async def test_rendered_tokens_as_a_prompt_are_the_chat():
    async with router(says("x")) as world:
        body = {"model": MODEL, "messages": MESSAGES}
        rendered = (await world.http.post(RENDER, json=body)).json()
        await world.chat(messages=MESSAGES)
        await world.complete(prompt=rendered["token_ids"])
        chat, completion = world.dispatcher.admitted
        assert list(chat.prompt_tokens) == list(completion.prompt_tokens) == rendered["token_ids"]
        assert rendered["prompt"] == bundled().render_chat(MESSAGES)
        tokenized = (await world.http.post("/tokenize", json=body)).json()
        assert tokenized == {"count": len(rendered["token_ids"]), "max_model_len": 256, "tokens": rendered["token_ids"]}
        text = (await world.http.post("/detokenize", json={"tokens": rendered["token_ids"]})).json()
        assert text == {"prompt": rendered["prompt"]}


async def test_a_client_can_count_and_render_as_the_router_does():
    """lm-evaluation-harness reads the template and the special tokens, and asks for the rest."""
    async with router(says("x")) as world:
        info = (await world.http.get("/tokenizer_info")).json()
        assert info["chat_template"] == bundled().chat_template
        eos = (
            await world.http.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False})
        ).json()
        assert set(eos["tokens"]) <= bundled().eos_token_ids
        assert len(eos["tokens"]) == 1
        assert set(info) == {"chat_template", "bos_token", "eos_token", "pad_token", "unk_token"}


@pytest.mark.parametrize("num_repeats", [1, 4000])  # the latter is tokenized in a thread
async def test_text_is_tokenized_as_a_prompt_is(num_repeats: int):
    text = "once upon a time " * num_repeats
    async with router(says("x")) as world:
        body = {"prompt": text, "return_token_strs": True}
        reply = (await world.http.post("/tokenize", json=body)).json()
        assert reply["tokens"] == list(bundled().encode(text, add_special_tokens=True))
        assert reply["count"] == len(reply["tokens"])
        assert "".join(reply["token_strs"]) == text
        assert world.dispatcher.admitted == []


@pytest.mark.parametrize(
    "fields", [{"add_generation_prompt": False}, {"continue_final_message": False}, {"enable_thinking": False}]
)
async def test_a_text_may_have_fields_of_chats_that_ask_for_nothing(fields: dict[str, Any]):
    async with router(says("x")) as world:
        reply = await world.http.post("/tokenize", json={"prompt": "once", **fields})
        assert reply.json()["tokens"] == list(bundled().encode("once", add_special_tokens=True))


def test_the_schema_has_all_that_a_template_is_given():
    properties = tokenize_schema([MODEL], 2048)["properties"]
    of_templates = {"verbosity", "documents", "reasoning_effort", "chat_template_kwargs", "enable_thinking", "tools"}
    assert properties.keys() >= of_templates


async def test_bad_bodies_are_refused_by_name():
    async with router(says("x")) as world:

        async def refused(path: str, body: Any) -> httpx2.Response:
            reply = await world.http.post(path, json=body)
            assert reply.status_code == 400, reply.text
            return reply

        for body, param in (
            ({}, "prompt"),
            ({"prompt": 5}, "prompt"),
            ({"messages": []}, "messages"),
            ({"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
            ({"model": 5, "prompt": "x"}, "model"),
            ({"prompt": "x", "messages": MESSAGES}, "prompt"),
            ({"prompt": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
            ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
            ({"messages": MESSAGES, "tools": [{}]}, "tools[0]"),
        ):
            assert error_of(await refused("/tokenize", body))["param"] == param
        for tokens in (None, "x", [2048], [-1], [True], ["5"]):
            assert error_of(await refused("/detokenize", {"tokens": tokens}))["param"] == "tokens"
        error = error_of(await refused(RENDER, {"model": MODEL, "messages": MESSAGES, "tools": [{}]}))
        assert error["param"] == "tools[0]"
        for path in ("/tokenize", "/detokenize", RENDER):
            other = await world.http.post(path, json={"prompt": "x", "tokens": [5], "model": "other"})
            assert other.status_code == 404
        assert (await world.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"add_generation_prompt": False},
    ],
)
async def test_a_chat_is_tokenized_with_all_that_its_prompt_has(fields: dict[str, Any]):
    async with router(says("x")) as world:
        body = {"model": MODEL, "messages": MESSAGES, **fields}
        tokenized = (await world.http.post("/tokenize", json=body)).json()
        rendered = (await world.http.post(RENDER, json=body)).json()
        assert tokenized["tokens"] == rendered["token_ids"]
        plain = (await world.http.post("/tokenize", json={"messages": MESSAGES})).json()
        assert (tokenized["tokens"] == plain["tokens"]) == (fields.get("tool_choice") == "none")
