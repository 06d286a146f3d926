"""Chats that another router goes on with: in the middle of a tool call or of a thought, and on the next day."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from baton.domain.errors import ConstraintFailed, ContextOverflow, InvalidRequest, ModelNotFound
from baton.domain.ids import first_attempt
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.tokenizer import CAPABILITY, GrammarTokenizer
from baton.services.router import routes
from baton.services.router.openai.request_parser import ParsedRequest, RawRequest, RequestParser
from baton.services.router.streaming.cursor import Cursor
from baton.services.router.takeover import foreign_calls
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel
from baton.store.store import CallStatus
from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.mocks.speech import ConstrainedSpeech, ForcedSpeech, Speech
from tests.service.takeover.router_cluster import (
    CHAT,
    Event,
    RouterCluster,
    opened,
    resumed,
    router_cluster,
    undisturbed,
)
from tests.unit.router.text.text_models import marked

pytestmark = pytest.mark.timeout(60)

TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}{# tools <tool_call> #}"
)
MODEL = marked(TEMPLATE, ["<think>", "</think>"])
END = 2
BEFORE_MIDNIGHT = datetime(2031, 3, 31, 23, 59, 58, tzinfo=UTC)
DATE = "31 Mar 2031"

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALLS = [("add", '{"a": 1234}'), ("add", '{"a": 5}')]
SAID = "One.\n" + "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLS
)
CHAT_WITH_TOOLS: dict[str, Any] = {"tools": [ADD], "max_tokens": 100, "stream_options": {"include_usage": True}}
BUDGET = 6
THOUGHT: dict[str, Any] = {
    "enable_thinking": True,
    "thinking_token_budget": BUDGET,
    "max_tokens": 40,
    "return_token_ids": True,
}
"""With token ids each token has an event."""


def tokens(text: str) -> tuple[int, ...]:
    return (*MODEL.encode(text, add_special_tokens=False), END)


def compiler(model: TextModel) -> GrammarCompiler:
    return GrammarCompiler(GrammarTokenizer(model.tokenizer_json(), model.vocab_size, model.eos_token_ids))


def speak(w: RouterCluster, speech: Speech, hold_at: int | None = None) -> None:
    """All workers say this from now on; the next request stops before one of its tokens."""
    for worker in w.cluster.workers:
        worker.speech = speech
    w.decode.script = [] if hold_at is None else [ScriptedAction(Phase.DECODE, Hold(), index=hold_at)]


class Clock:
    """The wall clock of both routers, in seconds since 1970."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = BEFORE_MIDNIGHT
        stand_in = SimpleNamespace(time=lambda: self.now.timestamp(), monotonic=time.monotonic)
        monkeypatch.setattr(routes, "time", stand_in)


@contextmanager
def time_zone(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        try:
            yield
        finally:
            patch.undo()
            time.tzset()


def deltas(events: list[Event]) -> list[dict[str, Any]]:
    chunks = [json.loads(event.data) for event in events if event.data != "[DONE]"]
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


def calls_of(events: list[Event]) -> list[dict[str, str]]:
    """The tool calls of a stream, merged by their index."""
    calls: dict[int, dict[str, str]] = {}
    for part in (part for delta in deltas(events) for part in delta.get("tool_calls", ())):
        call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
        call["id"] += part.get("id") or ""
        call["name"] += part["function"].get("name") or ""
        call["arguments"] += part["function"].get("arguments") or ""
    return [calls[index] for index in sorted(calls)]


def num_events(events: list[Event], num_tokens: int) -> int:
    """The events that the first tokens make: a parser holds some tokens back."""
    return sum(sum(Cursor.parse(event.id).counts) <= num_tokens for event in events)


def merged(events: list[Event], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas(events))


async def lost_at(
    w: RouterCluster, num_tokens: int, expected: list[Event], clock: Clock | None = None, **body: Any
) -> list[Event]:
    """The events of a client whose router loses the store after `num_tokens` tokens; the other one goes on.

    `clock` strikes midnight before that.
    """
    here, there = w.routers
    num_seen = num_events(expected, num_tokens)
    async with opened(here, CHAT, **body) as stream:
        await w.until_emitted(stream.call_id, num_tokens)
        seen = await stream.take(num_seen)
        if clock is not None:
            clock.now += timedelta(seconds=5)
        here.store.away = True
        await w.until_owned(stream.call_id, "router-1")
        id = stream.call_id
    await w.until(id, CallStatus.ENDED)
    async with resumed(there, id, seen[-1].id if seen else "") as again:
        rest = await again.rest()
    first, second = (request for request in w.decode.requests if request.id.request_id == id)
    assert (second.id.attempt, second.num_emitted) == (first_attempt(2), num_tokens)
    assert second.tokens[: second.num_prompt_tokens] == first.tokens, "the prompt was rendered anew"
    assert second.constraint == first.constraint
    return seen + rest


async def test_a_client_resumes_anywhere_in_its_calls(tmp_path):
    said = tokens(SAID)
    async with router_cluster(tmp_path, model=(MODEL, ImageModel())) as w:
        speak(w, ForcedSpeech(said))
        expected = await undisturbed(w.routers[0], CHAT, **CHAT_WITH_TOOLS)
        assert [(call["name"], call["arguments"]) for call in calls_of(expected)] == CALLS
        for at in range(3, len(said), 9):
            speak(w, ForcedSpeech(said), at)
            async with opened(w.routers[0], CHAT, **CHAT_WITH_TOOLS) as stream:
                await w.until_emitted(stream.call_id, at)
                seen = await stream.take(num_events(expected, at))
            await w.until(stream.call_id, CallStatus.ABANDONED)
            async with resumed(w.routers[1], stream.call_id, seen[-1].id if seen else "") as again:
                got = seen + await again.rest()
            check_calls(got, expected)


@pytest.mark.parametrize("part", ['{"a": 12', "</tool_call>\n"])
async def test_a_router_is_lost_in_a_call_before_midnight(tmp_path, monkeypatch, part):
    """The other router is in another time zone, and on another day: it renders the prompt of the call's own."""
    said, num_tokens = tokens(SAID), len(tokens(SAID[: SAID.index(part) + len(part)])) - 1
    clock = Clock(monkeypatch)
    async with router_cluster(tmp_path, model=(MODEL, ImageModel())) as w:
        speak(w, ForcedSpeech(said))
        expected = await undisturbed(w.routers[0], CHAT, **CHAT_WITH_TOOLS)
        speak(w, ForcedSpeech(said), num_tokens)
        with time_zone(monkeypatch, "Pacific/Kiritimati"):
            got = await lost_at(w, num_tokens, expected, clock, **CHAT_WITH_TOOLS)
        prompts = [request.tokens[: request.num_prompt_tokens] for request in w.decode.requests]
        assert {MODEL.decode(prompt, skip_special_tokens=False)[: len(DATE)] for prompt in prompts} == {DATE}
        check_calls(got, expected)
        await undisturbed(w.routers[1], CHAT, **CHAT_WITH_TOOLS)
        today = MODEL.decode(w.decode.requests[-1].tokens, skip_special_tokens=False)
        assert today.startswith("01 Apr 2031"), "a new call has the new date"


CHANGED = marked(f"Be brief. {TEMPLATE}", ["<think>", "</think>"])


async def abandoned_chat(w: RouterCluster, is_lost: bool) -> tuple[str, list[Event]]:
    """A chat whose client has left, and whose router is lost or not, which the other router refuses; and its answer."""
    first, second = w.routers
    speak(w, ForcedSpeech(tokens(SAID)))
    expected = await undisturbed(first, CHAT, **CHAT_WITH_TOOLS)
    speak(w, ForcedSpeech(tokens(SAID)), 9)
    async with opened(first, CHAT, **CHAT_WITH_TOOLS) as stream:
        id = stream.call_id
        await w.until_emitted(id, 9)
        if is_lost:
            first.store.away = True
            await w.until_owned(id, "router-1")
    assert (await w.until(id, CallStatus.ABANDONED)).prompt_digest
    refused = await second.http.get(f"/v1/requests/{id}/stream")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "prompt_changed")
    assert refused.headers["retry-after"] == "1"
    return id, expected


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_router_that_makes_another_prompt_does_not_go_on(tmp_path, is_lost):
    """Neither after the first router is lost nor for a client that comes to it; the first one still can."""
    async with router_cluster(tmp_path, model=(MODEL, ImageModel()), later_text=CHANGED) as w:
        first = w.routers[0]
        id, expected = await abandoned_chat(w, is_lost)
        attempts = [request.id.attempt for request in w.decode.requests if request.id.request_id == id]
        assert attempts == [first_attempt(1)], "no worker was asked with the other prompt"
        first.store.away = False
        async with resumed(first, id) as again:
            check_calls(await again.rest(), expected)


SAME = marked(TEMPLATE, ["<think>", "</think>"])
REFUSALS = [
    InvalidRequest("unknown field", param="tools"),
    ConstraintFailed("no grammar"),
    ModelNotFound("no such model"),
    ContextOverflow("too long"),
]


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.code)
async def test_a_router_that_refuses_a_stored_call_does_not_go_on(tmp_path, monkeypatch, refusal, is_lost):
    """The call waits for a router that reads it as the first one; only a wrong cursor is the client's error."""
    parse = RequestParser._parse

    def refuse(parser: RequestParser, raw: RawRequest, *more: Any) -> ParsedRequest:
        if raw.stored and parser._text is SAME:
            raise refusal
        return parse(parser, raw, *more)

    monkeypatch.setattr(RequestParser, "_parse", refuse)
    async with router_cluster(tmp_path, model=(MODEL, ImageModel()), later_text=SAME) as w:
        first = w.routers[0]
        id, expected = await abandoned_chat(w, is_lost)
        first.store.away = False
        wrong = await first.http.get(f"/v1/requests/{id}/stream", headers={"last-event-id": f"{id}:1,1"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "last_event_id")
        async with resumed(first, id) as again:
            check_calls(await again.rest(), expected)


async def test_a_call_that_only_other_routers_could_continue_ends(tmp_path, monkeypatch):
    """Its clients are told to try again until a deadline; then that the answer is lost, for good and on any router."""
    said = tokens(SAID)
    async with router_cluster(tmp_path, model=(MODEL, ImageModel()), later_text=CHANGED) as w:
        first, second = w.routers
        speak(w, ForcedSpeech(said), 9)
        async with opened(first, CHAT, **CHAT_WITH_TOOLS) as stream:
            id = stream.call_id
            await w.until_emitted(id, 9)
        await w.until(id, CallStatus.ABANDONED)
        path = f"/v1/requests/{id}/stream"
        refused = await second.http.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "prompt_changed")
        monkeypatch.setattr(foreign_calls, "FOREIGN_DEADLINE_S", 0.0)
        lost = await second.http.get(path)
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "answer_lost")
        assert "retry-after" not in lost.headers
        assert "send the request again" in lost.json()["error"]["message"]
        await w.until(id, CallStatus.ENDED)
        monkeypatch.setattr(foreign_calls, "FOREIGN_DEADLINE_S", 3600.0)
        assert (await second.http.get(path)).status_code == 404
        late = (await first.http.get(path)).text  # it reads what the journal has, and then that there is no more
        assert '"answer_lost"' in late
        assert "[DONE]" not in late
        attempts = [request.id.attempt for request in w.decode.requests if request.id.request_id == id]
        assert attempts == [first_attempt(1)], "no worker was asked with the other prompt"


async def test_a_call_of_an_older_router_names_no_prompt(tmp_path):
    """It goes on as before: the digest is not known."""
    said = tokens(SAID)
    async with router_cluster(tmp_path, model=(MODEL, ImageModel())) as w:
        speak(w, ForcedSpeech(said), 9)
        async with opened(w.routers[0], CHAT, **CHAT_WITH_TOOLS) as stream:
            await w.until_emitted(stream.call_id, 9)
        record = await w.until(stream.call_id, CallStatus.ABANDONED)
        older = replace(record, epoch=2, prompt_digest="", status=CallStatus.OPEN)
        await w.store.put_call(older)
        assert await w.store.end_call(record.id, older.ballot, CallStatus.ABANDONED)
        async with resumed(w.routers[1], stream.call_id) as again:
            assert calls_of(await again.rest())


def check_calls(got: list[Event], expected: list[Event]) -> None:
    """Nothing is lost, repeated or renamed."""
    calls = calls_of(got)
    assert [(call["name"], call["arguments"]) for call in calls] == CALLS
    assert len({call["id"] for call in calls}) == len(calls)
    assert merged(got, "content") == merged(expected, "content")
    assert [event.id.partition(":")[2] for event in got] == [event.id.partition(":")[2] for event in expected]
    assert got[-1].data == "[DONE]"
    assert json.loads(got[-2].data)["usage"] == json.loads(expected[-2].data)["usage"]


@pytest.mark.parametrize("num_tokens", [2, BUDGET])
async def test_a_thinking_budget_holds_over_a_takeover(tmp_path, num_tokens):
    """The model would think on; it is counted from the first token of the answer, not of the attempt."""
    said = tokens("a b c d e f g h i j k l m n o p q")
    async with router_cluster(tmp_path, model=(MODEL, ImageModel())) as w:
        for worker in w.cluster.workers:
            worker.grammars = CAPABILITY
        await w.cluster.announce()
        speech = ConstrainedSpeech(said, compiler(MODEL))
        speak(w, speech)
        expected = await undisturbed(w.routers[0], CHAT, **THOUGHT)
        speak(w, speech, num_tokens)
        got = await lost_at(w, num_tokens, expected, **THOUGHT)
        thought, text = merged(got, "reasoning_content"), merged(got, "content")
        assert (thought, text) == (merged(expected, "reasoning_content"), merged(expected, "content"))
        assert len(MODEL.encode(thought, add_special_tokens=False)) == BUDGET
        assert text
