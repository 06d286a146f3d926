"""Every flipped bit, and every repeated, swapped, dropped or reflected frame, closes the connection without effect."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from baton.rpc.gen import session_pb2 as pb
from baton.session.lifecycle import SessionState
from baton.session.session import ROUTER_KINDS, BadFrame, MessageSession
from baton.session.tags import ConnectionKeys, FrameTagger
from tests.property.session.session_world import LIMITS, SessionWorld

KEYS = ConnectionKeys(b"a" * 32, b"b" * 32)


def listener_end() -> MessageSession:
    session = MessageSession(5, ROUTER_KINDS, LIMITS, 0.0)
    session.connected(KEYS, 0, 0.0)
    return session


def frames(num: int) -> list[pb.SessionMessage]:
    """The dialler's first frames, an abort each."""
    tagger, made = FrameTagger(KEYS.received), []
    for seq in range(1, num + 1):
        abort = pb.StreamMessage(stream=seq, abort=pb.Abort(reason="gone"))
        body = pb.Frame(seq=seq, messages=[abort]).SerializeToString()
        made.append(pb.SessionMessage(body=body, tag=tagger.tag(body)))
    return made


def test_every_flipped_bit_is_noticed():
    whole = frames(1)[0].SerializeToString()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        session = listener_end()
        with pytest.raises((BadFrame, DecodeError)):
            session.receive(pb.SessionMessage.FromString(bytes(data)), 0.0)
        assert session.last_applied_seq == 0


def test_every_truncated_frame_is_noticed():
    whole = frames(1)[0].SerializeToString()
    for length in range(len(whole)):
        session = listener_end()
        with pytest.raises((BadFrame, DecodeError)):
            session.receive(pb.SessionMessage.FromString(whole[:length]), 0.0)
        assert session.last_applied_seq == 0


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 1), (0, 1, 0)])
def test_frames_out_of_order_break_the_connection(order: tuple[int, ...]):
    session, made = listener_end(), frames(3)
    for number in order[:-1]:
        if session.state is SessionState.OPEN and number == session.last_applied_seq:
            session.receive(made[number], 0.0)
    wrong = next(number for place, number in enumerate(order) if number != place)
    with pytest.raises(BadFrame):
        session.receive(made[wrong], 0.0)
    assert session.state is SessionState.BROKEN
    assert session.receive(made[0], 0.0) == [], "a broken connection is not read any more"


def test_a_reflected_frame_is_noticed():
    world = SessionWorld()
    world.dial()
    world.post_down(0)
    world.settle()
    assert world.listener is not None
    world.post_down(0)
    message = world.dialler.take(world.now)
    assert message is not None
    with pytest.raises(BadFrame, match="tag"):
        world.dialler.receive(message, world.now)


def test_a_frame_that_was_applied_before_is_dropped_and_acknowledged():
    session, first = listener_end(), frames(1)[0]
    assert len(session.receive(first, 0.0)) == 1
    session.broken(0.1)
    session.connected(KEYS, 0, 0.1)  # the handshake began before the frame was applied
    assert session.receive(first, 0.2) == []
    assert session.num_duplicates == 1
    answer = session.take(0.2)
    assert answer is not None
    assert pb.Frame.FromString(answer.body).ack == 1


def test_a_late_proof_does_not_replace_a_newer_connection():
    world = SessionWorld()
    world.dial()
    world.deliver_down(0)
    world.deliver_up(0)  # the first proof is on its way
    world.dial()
    for deliver in (world.deliver_down, world.deliver_up, world.deliver_down):
        deliver(0)
    first, second = world.connections
    world._read_at_listener(first, first.to_listener.popleft())
    assert first.accepted is None
    assert second.listener_open
    assert world.acceptor.sessions[0].connection == 2
