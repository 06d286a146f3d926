"""Streamed and whole answers are equal over thousands of outputs, in every format of calls and of reasoning.

The router answers the same chat twice, and is given the same tokens in other bundles. Outputs are calls, reasoning,
JSON and text as models write them, most of them damaged: cut, doubled, of another format, or with random tokens.
`BATON_TRANSCRIPTS` changes the number of outputs a format.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from baton.domain.request import FinishReason, OutputToken
from baton.services.router.generation import SequenceSpec, TokenChunk
from baton.services.router.text.parsers.harmony import CALL, CHANNEL, END, MARKERS, MESSAGE, RETURN, START
from baton.services.router.text.parsers.registry import HARMONY, TOOL_FORMATS
from baton.services.router.text.text_model import TextModel
from tests.fake_dispatcher import EmitChunk, ScriptStep
from tests.fuzz.http_app import MODEL, FuzzedApp
from tests.unit.router.text.test_tool_formats import AT_HEAD, SCHEMAS, WRITERS, mutated
from tests.unit.router.text.text_models import marked

NUM_OUTPUTS = int(os.environ.get("BATON_TRANSCRIPTS", "100"))
MAX_MODEL_LEN = 4096
THINK = ["<think>", "</think>"]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
ANSWERS = ('{"a": [1, "é"], "b": {"c": null}}', "so it is é🦊\n", "a < b\n\n", "", '[{"x": "</think>"}]')
Draw = random.Random


def template_of(name: str) -> str:
    signs = " ".join(TOOL_FORMATS[name].signatures[0])
    thinks = "" if name == HARMONY else " <think>"
    return "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}{# " + signs + thinks + " #}"


def model_of(name: str, *, markers_are_tokens: bool) -> TextModel:
    markers = [*MARKERS] if name == HARMONY else [*THINK, *TOOL_FORMATS[name].markers] if markers_are_tokens else []
    return marked(template_of(name), markers)


def calls_of(draw: Draw) -> list[tuple[str, dict[str, Any]]]:
    texts = ("", "a}", "</", 'é"\\', "\n", "<tool_call>", "🦊 b")
    makers: tuple[Callable[[], tuple[str, dict[str, Any]]], ...] = (
        lambda: ("add", {"a": draw.randint(-9, 99), "b": draw.choice([None, [], [1, 2]])}),
        lambda: ("say", {"text": draw.choice(texts), "on": draw.random() < 0.5}),
        lambda: ("now", {}),
    )
    return [draw.choice(makers)() for _ in range(draw.choice((1, 1, 2, 3)))]


def harmony_output(draw: Draw) -> str:
    """Messages in their channels, some without a part."""
    parts = []
    for name, arguments in calls_of(draw):
        body = json.dumps(arguments) if draw.random() < 0.8 else "{broken"
        parts.append(f"{START}assistant{CHANNEL}commentary to=functions.{name} json{MESSAGE}{body}{CALL}")
    parts.append(f"{START}assistant{CHANNEL}final{MESSAGE}{draw.choice(ANSWERS)}{draw.choice([RETURN, END, ''])}")
    if draw.random() < 0.6:
        parts.insert(0, f"{CHANNEL}analysis{MESSAGE}hm é {draw.choice(ANSWERS)}{END}{START}assistant")
    rest = parts[1:]
    draw.shuffle(rest)
    parts[1:] = rest
    output = "".join(parts[: draw.randint(1, len(parts))])
    at = draw.randrange(len(output) + 1)
    return output if draw.random() < 0.6 else output[:at] + draw.choice(["", *MARKERS, "x"]) + output[at + 1 :]


def output_of(name: str, draw: Draw) -> str:
    if name == HARMONY:
        return harmony_output(draw)
    calls = calls_of(draw) if draw.random() < 0.8 else []
    written = mutated(name, calls, draw.randrange(2**20)) if calls and draw.random() < 0.5 else ""
    written = written or (WRITERS[name](calls) if calls else "")
    before = "" if name in AT_HEAD and draw.random() < 0.8 else draw.choice(ANSWERS)
    thought = draw.choice(["", "", "<think>\nhm é</think>\n\n", "<think>" + draw.choice(ANSWERS), "</think>"])
    return thought + before + written + draw.choice(["", "", *ANSWERS])


def damaged(tokens: list[int], vocab_size: int, draw: Draw) -> list[int]:
    """With random tokens in between now and then: the beginning of a character, a marker, a special one."""
    if draw.random() < 0.3:
        for _ in range(draw.randint(1, 4)):
            tokens.insert(draw.randrange(len(tokens) + 1), draw.randrange(vocab_size))
    return tokens


def bundled(tokens: Sequence[int], finish: FinishReason, draw: Draw) -> list[ScriptStep]:
    """The tokens in chunks of 1 to 8, the last one with the end."""
    steps, at = list[ScriptStep](), 0
    while at < len(tokens):
        part = tokens[at : at + draw.randint(1, draw.choice((1, 3, 8)))]
        chunk = tuple(OutputToken(at + index, token) for index, token in enumerate(part))
        at += len(part)
        steps.append(EmitChunk(TokenChunk(chunk, 0, finish if at == len(tokens) else None)))
    return steps


def fields_of(text: TextModel, draw: Draw) -> dict[str, Any]:
    """A chat of a model. A form needs reasoning that ends with a token, and only tags may stay in the content."""
    thinks = not text.added_tokens(THINK).keys().isdisjoint(THINK)
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "model": MODEL,
        "return_token_ids": True,
    }
    if draw.random() < 0.85:
        fields |= {"tools": TOOLS, "parallel_tool_calls": draw.random() < 0.7}
    elif thinks and draw.random() < 0.7:
        fields["response_format"] = {"type": "json_object"}
    if draw.random() < 0.25:
        fields |= {"stop": draw.choice(["}", "so", "</", "\n\n"]), "include_stop_str_in_output": draw.random() < 0.5}
    if draw.random() < 0.2:
        fields[
            draw.choice(["include_reasoning", "skip_special_tokens", *(["separate_reasoning"] if thinks else [])])
        ] = False
    return fields


def read_whole(body: bytes) -> dict[str, Any]:
    answer = json.loads(body)
    [choice] = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", ())
    assert len({call["id"] for call in calls}) == len(calls)
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        "finish": (choice["finish_reason"], choice.get("stop_reason")),
        "tokens": choice["token_ids"],
        "usage": answer["usage"],
    }


def read_stream(body: bytes) -> dict[str, Any]:
    """The same from events, each part checked: a call begins once, with its name and id."""
    events = [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: {")]
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "tokens": [], "finish": None}
    calls: list[list[str]] = found["calls"]
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice["delta"]
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning_content") or ""
        found["tokens"] += choice.get("token_ids") or []
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"]
                calls.append([part["function"]["name"], ""])
            else:
                assert part["index"] == len(calls) - 1
                assert not part["function"].get("name")
            calls[-1][1] += part["function"].get("arguments") or ""
        if choice["finish_reason"] is not None:
            assert found["finish"] is None
            found["finish"] = (choice["finish_reason"], choice.get("stop_reason"))
    return {**found, "calls": [tuple(call) for call in calls], "usage": events[-1]["usage"]}


MODELS = [(name, tokens) for name in sorted(TOOL_FORMATS) for tokens in (False, True) if tokens or name != HARMONY]


@pytest.fixture(scope="module", params=MODELS, ids=lambda of: f"{of[0]}-{'tokens' if of[1] else 'text'}")
def router(request: pytest.FixtureRequest) -> Iterator[tuple[str, TextModel, FuzzedApp]]:
    """A format, and a router whose model writes it; its markers are tokens or text."""
    name, markers_are_tokens = request.param
    text = model_of(name, markers_are_tokens=markers_are_tokens)
    app = FuzzedApp(text, MAX_MODEL_LEN)
    try:
        yield name, text, app
    finally:
        app.close()


def test_streamed_answers_are_whole_answers(router: tuple[str, TextModel, FuzzedApp]) -> None:
    name, text, app = router
    num_calls = num_texts = 0
    for seed in range(NUM_OUTPUTS):
        draw = Draw(f"{name}/{seed}")
        output, fields = output_of(name, draw), fields_of(text, draw)
        tokens = damaged([*text.encode(output, add_special_tokens=False)], text.vocab_size, draw)
        finish = draw.choice([FinishReason.STOP, FinishReason.LENGTH])
        tokens += [2] if finish is FinishReason.STOP or not tokens else []
        answers = []
        for stream in (False, True):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            app.dispatcher.script = partial(script, bundled(tokens, finish, draw))
            reply = app.post("/v1/chat/completions", {**fields, **options})
            assert reply.status == 200, (seed, reply.body)
            answers.append(read_stream(reply.body) if stream else read_whole(reply.body))
        assert answers[0] == answers[1], (seed, output, fields)
        assert all(called in SCHEMAS for called, _ in answers[0]["calls"])
        num_calls += len(answers[0]["calls"])
        num_texts += bool(answers[0]["content"])
    assert num_calls > NUM_OUTPUTS // 8
    assert num_texts > NUM_OUTPUTS // 8


def script(steps: list[ScriptStep], sequence: SequenceSpec) -> list[ScriptStep]:
    return steps
