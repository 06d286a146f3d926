"""The streams of a session at a worker: prompts, ends, bounds and reconciliation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from baton.domain.errors import InvalidRequest
from baton.domain.ids import AttemptId, RequestId
from baton.domain.trace_context import TraceContext
from baton.rpc.codec import encode_id
from baton.rpc.gen import common_pb2, decode_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.session.prompts import split_prompt
from baton.session.streams import UNLISTED_GRACE_S
from baton.worker.sessions import served_streams
from baton.worker.sessions.served_streams import ServedStreams
from baton.worker.sessions.session_handlers import Answer, SessionHandlers, WriteTokens

TRACEPARENT = "00-00000000000000000000000000000001-0000000000000002-01"


@dataclass
class ServedRig:
    """Streams whose attempts emit what the test puts; what they post is listed."""

    posted: list[Answer] = field(default_factory=list)
    served: dict[str, tuple[list[int], TraceContext]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    writes: dict[str, WriteTokens] = field(default_factory=dict)
    events: dict[str, asyncio.Queue[Answer | Exception]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.streams = ServedStreams(cast(Any, self), SessionHandlers(generate=self.serve), 1 << 15)

    def post(self, message: pb.StreamMessage) -> None:
        self.posted.append(message)

    def post_rows(self, rows: list[pb.TokenRow]) -> None:
        self.posted += rows

    def post_tokens(self, stream: int, first_index: int, tokens: list[int]) -> None:
        self.posted.append(pb.TokenRow(stream=stream, first_index=first_index, tokens=tokens))

    async def serve(
        self, request: decode_pb2.GenerateRequest, trace: TraceContext, write: WriteTokens
    ) -> AsyncGenerator[Answer, None]:
        name = request.request.id.request_id
        self.writes[name] = write
        self.served[name] = list(request.request.tokens), trace
        self.running.add(name)
        try:
            while True:
                event = await self.events.setdefault(name, asyncio.Queue()).get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, pb.TokenRow) and event.finish_reason:
                    return
        finally:
            self.running.discard(name)

    def open(self, number: int, name: str, tokens: list[int] | None = None) -> None:
        request = common_pb2.EngineRequest(id=encode_id(AttemptId(RequestId(name), 1)))
        opened = pb.Open(request=request, reservation_id="r", traceparent=TRACEPARENT, http_request_id="http-1")
        messages = [pb.StreamMessage(stream=number, open=opened)]
        if tokens is not None:
            messages += [pb.StreamMessage(stream=number, prompt=part) for part in split_prompt(tokens)]
        self.streams.apply(messages)

    def open_whole(self, number: int, name: str, tokens: list[int]) -> None:
        request = common_pb2.EngineRequest(id=encode_id(AttemptId(RequestId(name), 1)), tokens=tokens)
        self.streams.apply([pb.StreamMessage(stream=number, open=pb.Open(request=request))])

    def emit(self, name: str, event: Answer | Exception) -> None:
        self.events.setdefault(name, asyncio.Queue()).put_nowait(event)

    def ends(self) -> list[tuple[int, str]]:
        return [
            (message.stream, message.ended.failure.code)
            for message in self.posted
            if isinstance(message, pb.StreamMessage) and message.HasField("ended")
        ]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_attempt_starts_with_its_whole_prompt_and_its_trace():
    rig = ServedRig()
    rig.open(1, "a", [])
    rig.open(2, "b", list(range(20_000)))
    rig.open(3, "c")
    await settle()
    assert rig.served.keys() == {"a", "b"}
    tokens, trace = rig.served["b"]
    assert tokens == list(range(20_000))
    assert (trace.http_request_id, trace.traceparent) == ("http-1", TRACEPARENT)


async def test_an_attempt_starts_with_the_prompt_of_its_open():
    rig = ServedRig()
    rig.open_whole(1, "a", [7, 8])
    rig.open_whole(2, "b", [9] * (1 << 15))
    rig.open_whole(3, "c", [9] * ((1 << 15) + 1))
    await settle()
    assert {name: tokens for name, (tokens, _) in rig.served.items()} == {"a": [7, 8], "b": [9] * (1 << 15)}
    assert rig.ends() == [(3, "invalid_request")]
    rig.streams.apply([pb.StreamMessage(stream=1, prompt=part) for part in split_prompt([7, 8])])
    await settle()
    assert rig.ends()[1:] == [(1, "invalid_request")], "a part behind a whole prompt"
    assert rig.running == {"b"}


async def test_prompts_of_opens_count_until_they_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served_streams, "MAX_PROMPT_BYTES", 100)
    rig = ServedRig()
    rig.open_whole(1, "a", [1] * 20)
    rig.open_whole(2, "b", [1] * 6)
    await settle()
    assert (rig.ends(), rig.running) == ([(2, "overloaded")], {"a"})
    rig.streams.apply([pb.StreamMessage(stream=1, abort=pb.Abort())])
    rig.open_whole(3, "c", [1] * 25)
    await settle()
    assert (len(rig.ends()), rig.running) == (1, {"c"})


async def test_answers_carry_the_number_of_their_stream_until_the_end():
    rig = ServedRig()
    rig.open(1, "a", [1])
    rig.open(2, "b", [1])
    rig.emit("b", pb.TokenRow(first_index=0, tokens=[5]))
    rig.emit("a", pb.TokenRow(first_index=0, tokens=[6], finish_reason=common_pb2.FINISH_REASON_STOP))
    await settle()
    assert sorted(answer.stream for answer in rig.posted) == [1, 2]
    assert (len(rig.streams), rig.running) == (1, {"b"})


async def test_written_tokens_carry_the_number_of_their_stream():
    rig = ServedRig()
    for number, name in ((4, "a"), (7, "b")):
        rig.open(number, name, [1])
    await settle()
    rig.writes["b"](0, [5, 6])
    rig.writes["a"](3, [7])
    assert [(row.stream, row.first_index, list(row.tokens)) for row in rig.posted if isinstance(row, pb.TokenRow)] == [
        (7, 0, [5, 6]),
        (4, 3, [7]),
    ]


async def test_an_abort_ends_the_attempt_and_answers_nothing():
    rig = ServedRig()
    for number, name in enumerate("ab", start=1):
        rig.open(number, name, [1] if name == "a" else None)
    await settle()
    rig.streams.apply([pb.StreamMessage(stream=number, abort=pb.Abort()) for number in (1, 2, 1, 9)])
    await settle()
    assert (len(rig.streams), rig.running, rig.posted) == (0, set(), [])


async def test_a_lost_session_ends_all_attempts():
    rig = ServedRig()
    for number, name in enumerate("abc", start=1):
        rig.open(number, name, [1])
    await settle()
    assert rig.running == {"a", "b", "c"}
    rig.streams.on_ended("lost")
    await settle()
    assert (len(rig.streams), rig.running) == (0, set())


@pytest.mark.parametrize(
    ("error", "code"), [(InvalidRequest("no"), "invalid_request"), (ZeroDivisionError(), "broken")]
)
async def test_an_error_is_the_end_of_its_stream_only(error: Exception, code: str):
    rig = ServedRig()
    rig.open(1, "a", [1])
    rig.open(2, "b", [1])
    rig.emit("a", error)
    await settle()
    assert rig.ends() == [(1, code)]
    assert rig.running == {"b"}


async def test_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch):
    rig = ServedRig()
    rig.open(1, "a", [0] * ((1 << 15) + 1))
    assert rig.ends() == [(1, "invalid_request")]
    monkeypatch.setattr(served_streams, "MAX_PROMPT_BYTES", 100)
    part = pb.PromptPart(tokens=bytes(80))
    for number, name in ((2, "b"), (3, "c")):
        rig.open(number, name)
        rig.streams.apply([pb.StreamMessage(stream=number, prompt=part)])
    assert rig.ends()[1:] == [(3, "overloaded")]
    rig.streams.apply([pb.StreamMessage(stream=2, abort=pb.Abort())])
    rig.open(4, "d")
    rig.streams.apply([pb.StreamMessage(stream=4, prompt=part)])
    assert len(rig.ends()) == 2, "an end gives its bytes back"


async def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served_streams, "MAX_STREAMS", 2)
    rig = ServedRig()
    for number in (1, 2, 3):
        rig.open(number, str(number), [1])
    await settle()
    assert rig.ends() == [(3, "overloaded")]
    assert rig.running == {"1", "2"}


async def test_a_number_that_was_used_starts_nothing():
    rig = ServedRig()
    rig.open(2, "a", [1])
    rig.open(1, "b")
    await settle()
    assert rig.running == {"a"}


async def test_reconciliation_ends_what_one_side_does_not_have(monkeypatch: pytest.MonkeyPatch):
    rig = ServedRig()
    rig.open(1, "a", [1])
    rig.open(2, "b", [1])
    await settle()
    now = asyncio.get_running_loop().time()
    monkeypatch.setattr(rig.streams, "_clock", lambda: now + 2 * UNLISTED_GRACE_S)
    rig.streams.apply([pb.StreamMessage(reconcile=pb.Reconcile(streams=[2, 7]))])
    await settle()
    assert rig.running == {"b"}
    assert rig.ends() == [(7, "broken")]
