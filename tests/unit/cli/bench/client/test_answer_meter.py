"""Parsing of a streamed answer, for any split of its bytes."""

import json
from typing import Any

import pytest

from baton.services.cli.bench.client.answer_meter import AnswerMeter
from baton.services.cli.bench.client.sse import EventSplitter
from baton.services.cli.bench.results.records import MeasuredAnswer


def event(**body: Any) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def choice(text: str, finish: str | None = None) -> list[Any]:
    return [{"index": 0, "text": text, "finish_reason": finish}]


def delta(content: str | None, finish: str | None = None) -> list[Any]:
    return [{"index": 0, "delta": {"role": "assistant", "content": content}, "finish_reason": finish}]


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}


def read(*pieces: bytes, status: int = 200) -> MeasuredAnswer:
    """The answer from pieces received at 1, 2, 3 ... of a request sent at 0.5."""
    told: list[int] = []
    meter = AnswerMeter(told.append)
    meter.on_status(status)
    for at, piece in enumerate(pieces, 1):
        meter.on_body(piece, float(at))
    answer = meter.answer(0.5, 99.5)
    assert sum(told) == sum(delivery.num_tokens for delivery in answer.deliveries)
    return answer


STREAM = b": ping\n\nid: a:0\ndata: one\n\ndata: two\ndata:three\n\nevent: x\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_complete_for_any_split(newline, size):
    stream = STREAM.replace(b"\n", newline)
    splitter = EventSplitter()
    payloads = [p for at in range(0, len(stream), size) for p in splitter.feed(stream[at : at + size])]
    payloads += splitter.feed(b"\n") if newline == b"\r" else []  # a last \r waits for what follows it
    assert payloads == [b"one", b"two\nthree", b"[DONE]"]


def test_a_completion_is_measured():
    answer = read(
        event(choices=choice("a")),
        event(choices=choice("b")),
        event(choices=choice("", "length")),
        event(choices=[], usage=usage(2)) + b"data: [DONE]\n\n",
    )
    assert answer.failure is None
    assert answer.deliveries == ((0.5, 1), (1.5, 1))
    assert (answer.ended_s, answer.finish_reason) == (2.5, "length")
    assert (answer.num_output_tokens, answer.num_prompt_tokens) == (2, 7)


def test_a_role_without_content_is_no_first_token():
    answer = read(event(choices=delta("")), event(choices=delta("a")), event(choices=delta(None, "stop")))
    assert answer.deliveries == ((1.5, 1),)
    assert answer.failure is None


def test_bundled_tokens_are_counted_by_the_usage_in_their_event():
    answer = read(
        event(choices=choice("a"), usage=usage(1)),
        event(choices=choice("bcd"), usage=usage(4)),
        event(choices=choice("", "stop"), usage=usage(4)),
    )
    assert answer.deliveries == ((0.5, 1), (1.5, 3))
    assert answer.num_output_tokens == 4


def test_a_token_without_text_counts_by_usage():
    answer = read(event(choices=choice(""), usage=usage(1)), event(choices=choice("", "stop"), usage=usage(2)))
    assert answer.deliveries == ((0.5, 1), (1.5, 1))


def test_two_events_in_one_piece_arrive_together():
    answer = read(event(choices=choice("a")) + event(choices=choice("b", "stop")))
    assert answer.deliveries == ((0.5, 1), (0.5, 1))


def test_the_servers_total_overrides_the_event_count():
    answer = read(event(choices=choice("abc")), event(choices=choice("", "stop")), event(choices=[], usage=usage(3)))
    assert (answer.deliveries, answer.num_output_tokens) == (((0.5, 1),), 3)


@pytest.mark.parametrize(
    ("pieces", "status", "words"),
    [
        ([b'{"error": {"message": ', b'"full"}}'], 429, 'HTTP 429: {"error": {"message": "full"}}'),
        ([event(choices=choice("a")), event(error={"message": "lost"})], 200, 'error event: {"error": {"message":'),
        ([event(choices=choice("a")), b"data: {nonsense\n\n"], 200, "unreadable event: {nonsense"),
        ([event(choices=choice("a"))], 200, "without a finish reason"),
        ([event(choices=choice("", "stop"))], 200, "no event had content"),
        ([], 200, "without a finish reason"),
    ],
)
def test_an_invalid_answer_is_a_failure(pieces, status, words):
    answer = read(*pieces, status=status)
    assert words in str(answer.failure)


def test_a_broken_connection_overrides_other_failures():
    meter = AnswerMeter(lambda num_tokens: None)
    assert meter.answer(1.0, 3.0, "ConnectionResetError: gone").failure == "ConnectionResetError: gone"
    assert meter.answer(1.0, 3.0, "ConnectionResetError: gone").ended_s == 2.0
