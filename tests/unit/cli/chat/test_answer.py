"""Events of an answer become pieces, a history and times."""

from __future__ import annotations

import io
import json

import pytest

from baton.services.cli.chat.answer import AnswerFailed, AnswerPart, ChatAnswer, PartKind, refusal
from baton.services.cli.chat.terminal import ChatOutput, printable


def chunk(finish=None, usage=None, **delta) -> str:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}] if delta or finish else []
    return json.dumps({"choices": choices, "usage": usage})


def call_part(index=0, **function) -> dict:
    return {"index": index, "function": function}


def test_text_reasoning_and_calls_are_told_apart():
    answer = ChatAnswer(started_s=10.0)
    events = [
        chunk(role="assistant", reasoning_content="hm"),
        chunk(content="Hel"),
        chunk(content="lo"),
        chunk(tool_calls=[{"id": "c1", **call_part(name="f", arguments="")}]),
        chunk(tool_calls=[call_part(arguments='{"a": 1}')]),
        chunk(finish="tool_calls"),
        chunk(usage={"completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}),
    ]
    pieces = [piece for at, event in enumerate(events) for piece in answer.add(event, 10.5 + at)]
    assert [piece.kind.value for piece in pieces] == ["reasoning", "text", "text", "tool_call", "tool_call"]
    assert (answer.content, answer.reasoning) == ("Hello", "hm")
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert answer.tool_calls == [{"id": "c1", "type": "function", "function": function}]
    assert answer.stats() == "TTFT 500 ms - 1 tok/s - 5 tokens - 16 cached - ended by tool_calls"


def test_a_completion_is_text():
    answer = ChatAnswer(0.0)
    (piece,) = answer.add(json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": None}]}), 1.0)
    assert piece == AnswerPart(PartKind.TEXT, "x")


def test_times_that_are_not_known_are_not_shown():
    assert ChatAnswer(0.0).stats() == ""
    answer = ChatAnswer(0.0)
    list(answer.add(chunk(content="x", finish="stop"), 1.0))
    list(answer.add(chunk(usage={"completion_tokens": 1}), 1.0))
    assert answer.stats() == "TTFT 1000 ms - 1 tokens"


def test_an_error_event_ends_the_answer():
    with pytest.raises(AnswerFailed, match=r"worker lost \(worker_lost\)"):
        list(ChatAnswer(0.0).add(json.dumps({"error": {"message": "worker lost", "code": "worker_lost"}}), 1.0))


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (401, b'{"error": {"message": "no key", "code": "unauthorized"}}', "no key (unauthorized). Give a key with"),
        (502, b"<html>bad gateway</html>", "HTTP 502: <html>bad gateway"),
        (500, b"", "no text"),
        (400, b'{"error": "odd"}', "odd"),
    ],
)
def test_a_refusal_is_readable_from_any_server(status, content, words):
    assert words in str(refusal(status, content))


def test_a_model_cannot_control_the_terminal():
    assert printable("a\x1b]0;title\x07b\x9b2Jc\r\n\td") == "a]0;titleb2Jc\n\td"


def shown(styled: bool) -> str:
    out = io.StringIO()
    terminal = ChatOutput(styled, styled, out, io.StringIO())
    for piece in (AnswerPart(PartKind.REASONING, "hm"), AnswerPart(PartKind.TEXT, "Hi\x1b[2J")):
        terminal.piece(piece)
    terminal.end("TTFT 1 ms")
    return out.getvalue()


def test_a_pipe_gets_the_text_only_and_every_byte_of_it():
    assert shown(styled=False) == "Hi\x1b[2J\n"
    assert "thinking: " in shown(styled=True)
    assert "\x1b[2J" not in shown(styled=True)
