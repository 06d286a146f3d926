"""Why a choice stopped, and the tokens of its prompt: the same whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_dispatcher import one_token_chunks
from tests.service.http.http_server import events_of, router, says, text_of, tokens_of

FOX = "the quick brown fox"
FIRST = tokens_of(FOX, eos=False)


async def both(send: Any, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The choice of a whole response, and the events of a streamed one."""
    whole = (await send(return_token_ids=True, **body)).json()
    events = events_of((await send(return_token_ids=True, stream=True, **body)).text)[:-1]
    return whole, events


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("body", "text", "reason"),
    [
        ({}, FOX, None),
        ({"stop": ["zzz", "brown"]}, "the quick ", "brown"),
        ({"stop": "brown", "include_stop_str_in_output": True}, "the quick brown", "brown"),
        ({"stop": "brown", "no_stop_trim": True}, "the quick brown", "brown"),
        ({"stop": "zzz", "include_stop_str_in_output": True}, FOX, None),
    ],
)
async def test_a_stop_string_is_the_reason(chat: bool, body: dict[str, Any], text: str, reason: str | None):
    async with router(says(FOX)) as world:
        whole, events = await both(world.chat if chat else world.complete, **body)
        [choice] = whole["choices"]
        assert (choice["message"]["content"] if chat else choice["text"]) == text_of(events) == text
        assert (choice["stop_reason"], choice["finish_reason"]) == (reason, "stop")
        *pieces, last = [event["choices"][0] for event in events]
        assert last["stop_reason"] == reason
        assert not [piece for piece in pieces if "stop_reason" in piece]


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_token_of_the_client_is_the_reason(include: bool):
    async with router(lambda sequence: one_token_chunks(FIRST)) as world:
        body = {"stop_token_ids": [FIRST[-1]], "include_stop_str_in_output": include}
        whole, events = await both(world.complete, **body)
        [choice] = whole["choices"]
        assert choice["stop_reason"] == events[-1]["choices"][0]["stop_reason"] == FIRST[-1]
        assert (choice["text"] == FOX) == include
        assert choice["text"] == text_of(events)


async def test_prompt_tokens_come_once():
    async with router(says("x")) as world:
        whole, events = await both(world.chat, n=2)
        prompt = list(world.dispatcher.admitted[0].prompt_tokens)
        assert whole["prompt_token_ids"] == prompt
        assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
        prompts = [[5, 6], [7]]
        whole, events = await both(world.complete, prompt=prompts, n=2)
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[5, 6], [5, 6], [7], [7]]
        choices = [choice for event in events for choice in event["choices"]]
        for index in range(4):
            mine = [choice for choice in choices if choice["index"] == index]
            assert [c.get("prompt_token_ids") for c in mine] == [prompts[index // 2]] + [None] * (len(mine) - 1)
        assert "prompt_token_ids" not in (await world.chat()).json()
