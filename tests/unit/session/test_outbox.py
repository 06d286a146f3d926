"""Rows that wait join, as long as they are the same stream's next tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.rpc.gen import common_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.session.outbox import Outbox, OutboxLimits


def row(stream: int, first: int, *tokens: int, finish: common_pb2.FinishReason = 0) -> pb.TokenRow:  # type: ignore[assignment]
    return pb.TokenRow(stream=stream, first_index=first, tokens=tokens, finish_reason=finish)


def taken(outbox: Outbox) -> list[pb.StreamMessage]:
    body = outbox.take()
    assert body is not None
    return list(pb.Frame.FromString(body).messages)


def test_a_step_is_one_message():
    outbox = Outbox(OutboxLimits())
    for stream in range(1, 65):
        outbox.post_row(row(stream, 7, stream))
    [step] = taken(outbox)
    assert [(r.stream, r.first_index, list(r.tokens)) for r in step.step.rows] == [(n, 7, [n]) for n in range(1, 65)]
    assert outbox.take() is None


def test_rows_that_wait_join_and_keep_the_end():
    outbox = Outbox(OutboxLimits())
    for index in range(3):
        outbox.post_row(row(1, index, 100 + index))
    outbox.post_row(row(1, 3, 103, finish=common_pb2.FINISH_REASON_LENGTH))
    [step] = taken(outbox)
    assert list(step.step.rows) == [row(1, 0, 100, 101, 102, 103, finish=common_pb2.FINISH_REASON_LENGTH)]


def test_plain_tokens_that_wait_join_and_the_last_row_follows():
    outbox = Outbox(OutboxLimits())
    for index in range(3):
        outbox.post_tokens(1, index, [100 + index])
        outbox.post_tokens(2, index, [200 + index])
    last = row(1, 3, 103, finish=common_pb2.FINISH_REASON_LENGTH)
    outbox.post_row(last)
    [step] = taken(outbox)
    assert list(step.step.rows) == [row(1, 0, 100, 101, 102), row(2, 0, 200, 201, 202), last]
    assert outbox.waiting_bytes == 0


def test_a_gap_between_plain_tokens_stays_visible():
    outbox = Outbox(OutboxLimits())
    for index in (0, 2, 3, 3):
        outbox.post_tokens(1, index, [10 + index])
    [step] = taken(outbox)
    assert list(step.step.rows) == [row(1, 0, 10), row(1, 2, 12, 13), row(1, 3, 13)]


def test_a_message_between_plain_tokens_keeps_its_place():
    outbox = Outbox(OutboxLimits())
    outbox.post_tokens(1, 0, [10])
    outbox.post(pb.StreamMessage(stream=1, joined=pb.Joined()))
    outbox.post_tokens(1, 1, [11])
    kinds = [message.WhichOneof("kind") for message in taken(outbox)]
    assert kinds == ["step", "joined", "step"]


def test_a_gap_between_rows_stays_visible():
    """A joined row has one first index, so a gap inside would move every later token."""
    outbox = Outbox(OutboxLimits())
    for posted in (row(1, 0, 10), row(1, 2, 12), row(1, 3, 13), row(1, 3, 13)):
        outbox.post_row(posted)
    [step] = taken(outbox)
    assert [(r.first_index, list(r.tokens)) for r in step.step.rows] == [(0, [10]), (2, [12, 13]), (3, [13])]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3), st.booleans()), max_size=20))
def test_joined_rows_have_every_token_at_its_index(posted: list[tuple[int, int, int, bool]]):
    outbox = Outbox(OutboxLimits())
    expected: dict[int, list[tuple[int, int]]] = {}
    for stream, first, num_tokens, is_plain in posted:
        tokens = [1000 * stream + first + n for n in range(num_tokens)]
        if is_plain:
            outbox.post_tokens(stream, first, [*tokens])
        else:
            outbox.post_row(row(stream, first, *tokens))
        expected.setdefault(stream, []).extend(enumerate(tokens, start=first))
    found: dict[int, list[tuple[int, int]]] = {}
    while (body := outbox.take()) is not None:
        for message in pb.Frame.FromString(body).messages:
            for r in message.step.rows:
                found.setdefault(r.stream, []).extend(enumerate(r.tokens, start=r.first_index))
    assert found == expected


def prompt(stream: int, num_parts: int) -> list[pb.StreamMessage]:
    parts = [pb.PromptPart(tokens=bytes(40_000), last=n == num_parts - 1) for n in range(num_parts)]
    return [pb.StreamMessage(stream=stream, prompt=part) for part in parts]


def test_streams_take_turns_with_the_parts_of_their_prompts():
    """A short prompt that comes behind two long ones waits for one part of each, and never for a whole one."""
    outbox = Outbox(OutboxLimits(frame_bytes=30_000, window_bytes=10 << 20))
    for message in (*prompt(1, 5), *prompt(2, 4)):
        outbox.post(message)
    sent = taken(outbox)
    for message in prompt(3, 1):
        outbox.post(message)
    while outbox.has_work:
        sent += taken(outbox)
    assert [(message.stream, message.prompt.last) for message in sent[-1:]] == [(1, True)]
    assert 3 in [message.stream for message in sent[:6]]
    assert [m.prompt.last for m in sent if m.stream == 1] == [False] * 4 + [True]
    assert [m.prompt.last for m in sent if m.stream == 2] == [False] * 3 + [True]
    assert outbox.waiting_bytes == 0


def test_an_aborted_stream_sends_no_more_of_its_prompt():
    outbox = Outbox(OutboxLimits(frame_bytes=30_000, window_bytes=10 << 20))
    for message in (*prompt(1, 3), *prompt(2, 2)):
        outbox.post(message)
    taken(outbox)
    outbox.post(pb.StreamMessage(stream=1, abort=pb.Abort()))
    rest = []
    while outbox.has_work:
        rest += [(message.stream, message.WhichOneof("kind")) for message in taken(outbox)]
    assert rest[0] == (1, "abort")
    assert rest[1:] == [(2, "prompt"), (2, "prompt")]
    assert outbox.waiting_bytes == 0


@given(st.lists(st.one_of(st.integers(0, 70_000), st.none()), max_size=12))
def test_a_frame_has_what_was_posted_in_its_order(posted: list[int | None]):
    """Numbers: bytes of a message; None: a row. Frames are put together from the bytes of their messages."""
    outbox, sent = Outbox(OutboxLimits(window_bytes=10 << 20)), list[tuple[int, int | None]]()
    for number, num_bytes in enumerate(posted, start=1):
        if num_bytes is None:
            outbox.post_tokens(number, 0, [number])
        else:
            outbox.post(pb.StreamMessage(stream=number, abort=pb.Abort(reason="r" * num_bytes)))
    seqs = []
    while (body := outbox.take()) is not None:
        frame = pb.Frame.FromString(body)
        seqs.append(frame.seq)
        for message in frame.messages:
            sent += [(row.stream, None) for row in message.step.rows]
            sent += [(message.stream, len(message.abort.reason))] if message.HasField("abort") else []
    assert sent == list(enumerate(posted, start=1))
    assert seqs == list(range(1, len(seqs) + 1))
    assert outbox.waiting_bytes == 0


@pytest.mark.parametrize("num_bytes", [0, 100, 127, 128, 129, 16_383, 16_384, 16_400, 200_000])
def test_a_frame_is_what_protobuf_writes(num_bytes: int):
    posted = pb.StreamMessage(stream=1, abort=pb.Abort(reason="r" * num_bytes))
    outbox = Outbox(OutboxLimits())
    outbox.post(posted)
    body = outbox.take()
    assert body is not None
    assert pb.Frame.FromString(body) == pb.Frame(seq=1, messages=[posted])
    assert len(body) == pb.Frame(seq=1, messages=[posted]).ByteSize()
