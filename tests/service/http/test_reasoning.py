"""Reasoning over HTTP: a field of its own, whole and streamed alike, counted, and followed by text or calls."""

from __future__ import annotations

from typing import Any

import pytest

from baton.domain.constraint import FreePhase, GrammarPhase
from tests.fake_dispatcher import one_token_chunks
from tests.service.http.http_server import events_of, router, says, tokens_of
from tests.unit.router.text.text_models import marked

TEMPLATE = (
    "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}|{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking %}<think>\n{% endif %}{# <tool_call> #}"
)
MODEL = marked(TEMPLATE, ["<think>", "</think>"])
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def streamed(body: str) -> tuple[str, str, str | None, Any]:
    """Reasoning, text, finish reason and usage of a stream; deltas of reasoning have no content."""
    events = events_of(body)[:-1]
    choices = [event["choices"][0] for event in events if event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert all("content" in delta or delta["reasoning"] for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    text = "".join(delta.get("content", "") for delta in deltas)
    return reasoning, text, choices[-1]["finish_reason"], events[-1].get("usage")


@pytest.mark.parametrize(
    ("said", "fields", "reasoning", "text"),
    [
        ("<think>\nhm</think>\n\nYes.", {}, "\nhm", "Yes."),
        ("hm</think>\n\nYes.", {"enable_thinking": True}, "hm", "Yes."),
        ("hm</think>Yes.", {"enable_thinking": True, "stop": "m"}, "hm", "Yes."),
        ("Yes.", {}, "", "Yes."),
        ("<think>hm", {}, "hm", None),
        ("<think>hm</think>", {}, "hm", None),
    ],
)
async def test_reasoning_is_the_same_whole_and_streamed(
    said: str, fields: dict[str, Any], reasoning: str, text: str | None
):
    async with router(says(said, MODEL), MODEL) as world:
        whole = (await world.chat(**fields)).json()
        message = whole["choices"][0]["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, text)
        assert message.get("reasoning", "") == reasoning
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        found = streamed((await world.chat(**fields, **options)).text)
        assert found[:2] == (reasoning, text or "")
        usage = whole["usage"]
        assert found[3] == usage
        num_answer = len(tokens_of(said.partition("</think>")[2] if "</think>" in said else "", model=MODEL))
        num_reasoning = usage["completion_tokens"] - num_answer if reasoning else 0
        if "</think>" in said or not reasoning:
            assert usage["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}


async def test_calls_follow_reasoning():
    async with router(says(f"<think>hm {CALL}</think>{CALL}", MODEL), MODEL) as world:
        [choice] = (await world.chat(tools=TOOLS)).json()["choices"]
        assert choice["message"]["reasoning_content"] == f"hm {CALL}"
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]


async def test_reasoning_may_be_left_out_or_in_the_text():
    async with router(says("<think>hm</think>Yes.", MODEL), MODEL) as world:
        hidden = (await world.chat(include_reasoning=False)).json()
        assert hidden["choices"][0]["message"].keys() == {"role", "content", "refusal"}
        assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] > 2
        stream = (await world.chat(include_reasoning=False, stream=True)).text
        assert streamed(stream)[:2] == ("", "Yes.")
        for fields in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
            mixed = (await world.chat(**fields)).json()
            assert mixed["choices"][0]["message"]["content"] == "<think>hm</think>Yes."
            assert "completion_tokens_details" not in mixed["usage"]


async def test_structured_output_follows_reasoning():
    seen = []

    def script(sequence: Any) -> Any:
        seen.append(sequence)
        return one_token_chunks(tokens_of('hm</think>{"a": 1}', model=MODEL))

    async with router(script, MODEL) as world:
        answer = await world.chat(enable_thinking=True, response_format={"type": "json_object"})
        assert answer.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    thought, form = seen[0].constraint.phases
    assert isinstance(thought, FreePhase)
    assert isinstance(form, GrammarPhase)
    assert not thought.may_stop


async def test_reasoning_of_the_history_has_either_name():
    async with router(says("x", MODEL), MODEL) as world:
        for name in ("reasoning", "reasoning_content"):
            messages = [{"role": "assistant", "content": "b", name: "a"}, {"role": "user", "content": "c"}]
            body = {"model": "tiny", "messages": messages}
            rendered = await world.http.post("/v1/chat/completions/render", json=body)
            assert "[assistant]a|b" in rendered.json()["prompt"]
