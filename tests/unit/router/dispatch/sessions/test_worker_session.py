"""A router's end of a session: streams and their messages, ends, late messages and losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.domain.errors import WorkerLost
from baton.domain.trace_context import TraceContext
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.services.router.dispatch.sessions.worker_session import WorkerSession
from baton.session.lifecycle import SessionState
from baton.session.prompts import MAX_OPEN_TOKENS

TRACE = TraceContext("http-1", "0" * 31 + "1", "0" * 15 + "2", sampled=True)


@dataclass
class RecordedDialler:
    """The part of a `SessionDialler` that a session uses; lists what is posted."""

    posted: list[pb.StreamMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = SimpleNamespace(state=SessionState.OPEN)
        self.pump = SimpleNamespace(post=self.posted.append)

    async def run(self, owner: object) -> None:
        await asyncio.Event().wait()


@pytest.fixture
async def dialler() -> RecordedDialler:
    return RecordedDialler()


@pytest.fixture
async def session(dialler: RecordedDialler) -> AsyncIterator[WorkerSession]:
    made = WorkerSession(cast(Any, dialler))
    yield made
    made.task.cancel()
    made.on_ended("the test has ended")


def request(*tokens: int) -> decode_pb2.GenerateRequest:
    engine = common_pb2.EngineRequest(tokens=tokens, salt="salt")
    return decode_pb2.GenerateRequest(request=engine, reservation_id="r-1", prefill_id="p", deadline_s=3.0)


async def test_an_attempt_is_opened_without_its_tokens_which_follow(session: WorkerSession, dialler: RecordedDialler):
    asked = request(3, 4, 5)
    session.open(asked, TRACE)
    session.open(request(6), TRACE)
    opened, prompt, second, _ = dialler.posted
    assert (opened.stream, prompt.stream, second.stream) == (1, 1, 2)
    assert list(opened.open.request.tokens) == []
    assert (opened.open.request.salt, opened.open.reservation_id, opened.open.deadline_s) == ("salt", "r-1", 3.0)
    assert (opened.open.traceparent, opened.open.http_request_id) == (TRACE.traceparent, "http-1")
    assert (len(prompt.prompt.tokens), prompt.prompt.last) == (12, True)
    assert list(asked.request.tokens) == [3, 4, 5], "the request of the caller is not changed"


@pytest.mark.parametrize(
    ("num_tokens", "num_open", "num_parts"),
    [(0, 0, 1), (1, 1, 0), (MAX_OPEN_TOKENS, MAX_OPEN_TOKENS, 0), (MAX_OPEN_TOKENS + 1, 0, 1)],
)
async def test_a_short_prompt_is_in_the_open_of_its_stream(
    dialler: RecordedDialler, num_tokens: int, num_open: int, num_parts: int
):
    session = WorkerSession(cast(Any, dialler), opens_with_prompts=True)
    asked = request(*range(num_tokens))
    session.open(asked, TRACE)
    session.prefill(prefill_pb2.PrefillRequest(request=asked.request), TRACE)
    assert [(one.stream, one.WhichOneof("kind")) for one in dialler.posted] == [
        (1, "open"), *[(1, "prompt")] * num_parts, (2, "prefill"), *[(2, "prompt")] * num_parts,
    ]  # fmt: skip
    opened, prompt = dialler.posted[0].open.request, dialler.posted[1 + num_parts].prefill.request.request
    assert list(opened.tokens) == list(prompt.tokens) == list(range(num_open))
    assert (opened.salt, len(asked.request.tokens)) == ("salt", num_tokens)
    session.task.cancel()
    session.on_ended("the test has ended")


async def test_a_step_reaches_each_of_its_streams(session: WorkerSession):
    streams = [session.open(request(1), TRACE) for _ in range(3)]
    rows = [pb.TokenRow(stream=number, first_index=0, tokens=[number]) for number in (1, 2, 3)]
    session.apply([pb.StreamMessage(step=pb.StepTokens(rows=rows))])
    assert [await stream.read() for stream in streams] == rows


async def test_a_finish_or_a_failure_ends_the_stream_here(session: WorkerSession, dialler: RecordedDialler):
    first, second = (session.open(request(1), TRACE) for _ in range(2))
    last = pb.TokenRow(stream=1, first_index=0, tokens=[9], finish_reason=common_pb2.FINISH_REASON_STOP)
    ended = pb.Ended(failure=common_pb2.Failure(code="sent_back"))
    session.apply([pb.StreamMessage(step=pb.StepTokens(rows=[last, last])), pb.StreamMessage(stream=2, ended=ended)])
    assert [await first.read(), await first.read()] == [last, None]
    failed: Any = await second.read()
    assert failed.failed.code == "sent_back"
    num_posted = len(dialler.posted)
    first.cancel()
    second.cancel()
    assert len(dialler.posted) == num_posted, "the worker has ended them itself"


async def test_a_cancelled_stream_is_aborted_at_the_worker(session: WorkerSession, dialler: RecordedDialler):
    stream = session.open(request(1), TRACE)
    stream.cancel()
    assert dialler.posted[-1].stream == 1
    assert dialler.posted[-1].HasField("abort")
    session.apply([pb.StreamMessage(step=pb.StepTokens(rows=[pb.TokenRow(stream=1, tokens=[1])]))])
    with pytest.raises(asyncio.CancelledError):
        await stream.read()


async def test_an_import_keeps_what_it_says_and_does_not_say(session: WorkerSession):
    first, second = (session.open(request(1), TRACE) for _ in range(2))
    token = common_pb2.OutputToken(index=0, token=7)
    session.apply([pb.StreamMessage(stream=1, joined=pb.Joined(first_token=token))])
    session.apply([pb.StreamMessage(stream=2, joined=pb.Joined(times=common_pb2.ImportTimes(pages=3)))])
    told: Any = await first.read()
    timed: Any = await second.read()
    assert told.first_token == token
    assert not told.HasField("times")
    assert timed.times.pages == 3
    assert not timed.HasField("first_token")


async def test_a_lost_session_is_a_lost_worker_to_each_attempt(session: WorkerSession):
    streams = [session.open(request(1), TRACE) for _ in range(2)]
    session.on_ended("no connection")
    for stream in streams:
        with pytest.raises(WorkerLost, match="no connection"):
            await stream.read()


async def test_open_streams_are_listed_for_the_worker(session: WorkerSession, dialler: RecordedDialler):
    for _ in range(3):
        session.open(request(1), TRACE)
    session._abort(2)
    session._reconcile()
    assert list(dialler.posted[-1].reconcile.streams) == [1, 3]


async def test_a_session_that_is_cancelled_before_it_begins_ends_its_streams(dialler: RecordedDialler):
    session = WorkerSession(cast(Any, dialler))
    stream = session.open(request(1), TRACE)
    session.task.cancel()
    async with asyncio.timeout(5.0):
        with pytest.raises(WorkerLost, match="this process has ended"):
            await stream.read()


async def test_a_reservation_ends_with_its_reply(session: WorkerSession, dialler: RecordedDialler):
    first, second = (session.reserve(decode_pb2.ReserveRequest(num_tokens=3), TRACE) for _ in range(2))
    opened = dialler.posted[0]
    assert (opened.stream, opened.reserve.request.num_tokens) == (1, 3)
    assert (opened.reserve.traceparent, opened.reserve.http_request_id) == (TRACE.traceparent, "http-1")
    reply = decode_pb2.ReserveReply(reserved=decode_pb2.Reserved(reservation_id="r-1"))
    failed = pb.Ended(failure=common_pb2.Failure(code="overloaded"))
    session.apply([pb.StreamMessage(stream=1, reserve_reply=reply), pb.StreamMessage(stream=2, ended=failed)])
    assert [await first.read(), await first.read()] == [reply, None]
    refused: Any = await second.read()
    assert refused.refused.code == "overloaded"
    first.cancel()
    second.cancel()
    assert len(dialler.posted) == 2, "the worker has ended them itself"


@pytest.mark.parametrize("event", ["sealed", "failed", "ended"])
async def test_a_prompt_ends_with_its_seal_or_a_failure(session: WorkerSession, dialler: RecordedDialler, event: str):
    asked = prefill_pb2.PrefillRequest(request=request(3, 4).request, decode_prefix_len=2)
    stream = session.prefill(asked, TRACE)
    opened, prompt = dialler.posted
    assert (list(opened.prefill.request.request.tokens), list(asked.request.tokens)) == ([], [3, 4])
    assert (opened.prefill.request.decode_prefix_len, opened.prefill.http_request_id) == (2, "http-1")
    assert (prompt.stream, len(prompt.prompt.tokens), prompt.prompt.last) == (1, 8, True)
    accepted = prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
    failure = common_pb2.Failure(code="draining")
    last = {
        "sealed": pb.StreamMessage(stream=1, prefill_event=prefill_pb2.PrefillEvent(sealed=prefill_pb2.Sealed())),
        "failed": pb.StreamMessage(stream=1, prefill_event=prefill_pb2.PrefillEvent(failed=failure)),
        "ended": pb.StreamMessage(stream=1, ended=pb.Ended(failure=failure)),
    }[event]
    session.apply([pb.StreamMessage(stream=1, prefill_event=accepted), last])
    assert await stream.read() == accepted
    ended: Any = await stream.read()
    assert ended.WhichOneof("event") == ("sealed" if event == "sealed" else "failed")
    assert await stream.read() is None


@pytest.mark.parametrize(
    ("state", "is_sent"),
    [(SessionState.OPEN, True), (SessionState.BROKEN, True), (SessionState.LOST, False), (SessionState.LEAVING, False)],
)
async def test_aborts_go_with_a_session_that_lives(
    session: WorkerSession, dialler: RecordedDialler, state: SessionState, is_sent: bool
):
    dialler.session.state = state
    asked = common_pb2.AbortRequest(reason="cancelled")
    assert session.abort(asked) is is_sent
    assert [(one.stream, one.abort_attempt) for one in dialler.posted] == [(0, asked)] * is_sent
