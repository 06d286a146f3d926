"""Two ends over a hostile pipe keep N1 to N3 and N6 of the design, and bring everything over when it is whole again."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.rpc.gen import session_pb2 as pb
from baton.rpc.version import PROTOCOL_VERSION
from baton.session.acceptor import AcceptedSession, Acceptor
from baton.session.handshake import DiallerHandshake, HandshakeFailed, OfferedConnection, SessionRefused
from baton.session.lifecycle import ENDED_STATES, SessionState
from baton.session.outbox import Outbox, OutboxLimits
from baton.session.session import ROUTER_KINDS, WORKER_KINDS, BadFrame, MessageSession
from baton.session.tags import OPEN_SESSION_KEY, ConnectionKeys, FrameTagger
from tests.property.session.session_world import INCARNATION, LIMITS, SessionWorld

OPERATIONS = (
    "post_down", "post_up", "post_row", "post_row", "flush", "flush", "deliver_down", "deliver_up", "deliver_down",
    "deliver_up", "dial", "cut", "wait", "damage", "stand_still",
)  # fmt: skip
STEPS = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 255)), max_size=120)


def connected_world() -> SessionWorld:
    world = SessionWorld()
    world.dial()
    world.post_down(0)
    world.settle()
    return world


@settings(max_examples=400, deadline=None)
@given(STEPS)
@example([("post_down", 0), ("cut", 1), ("wait", 250)])  # lost at the worker, broken at the router
def test_what_is_applied_is_a_prefix_of_what_was_posted(steps: list[tuple[str, int]]):
    world = connected_world()
    for name, number in steps:
        getattr(world, name)(number)
        world.check()
    world.settle()
    world.check()
    assert world.dialler.state in ENDED_STATES or world.down.is_complete


def test_a_session_that_is_lost_at_the_worker_is_lost_at_the_router():
    world = connected_world()
    world.cut(1)
    world.now += 3.0
    world.worker.on_time(world.now)
    world.acceptor.remove_ended()
    world.dial()
    world.deliver_down(3)
    world.deliver_up(3)
    assert world.dialler.state in ENDED_STATES
    assert "not known here" in world.dialler.end_reason


def test_both_ends_of_a_cut_session_are_lost_in_time():
    world = connected_world()
    world.cut(2)
    for session in (world.dialler, world.worker):
        woken_at = session.next_wakeup()
        assert woken_at is not None
        assert woken_at <= world.now + LIMITS.resume_s
        session.on_time(woken_at)
        assert session.state is SessionState.LOST
        assert session.next_wakeup() is None


def test_a_silent_connection_is_pinged_then_broken_then_lost():
    world = connected_world()
    begun_at = world.now
    while (woken_at := world.dialler.next_wakeup()) is not None:
        assert woken_at > world.now or world.dialler.has_work(world.now), "a wake-up without work"
        world.now = max(world.now, woken_at)
        world.dialler.on_time(world.now)
        while world.dialler.take(world.now) is not None:
            pass  # nobody hears it
    assert world.now - begun_at <= LIMITS.silent_s + LIMITS.resume_s + 0.01


def test_both_ends_of_a_connection_that_stood_still_ask_once_more():
    world = connected_world()
    world.stand_still(200)
    assert world.dialler.state is world.worker.state is SessionState.OPEN
    world.now += LIMITS.ping_s
    world.flush()
    world.deliver_down(3)
    world.deliver_up(3)
    world.now += LIMITS.silent_s - 0.01
    for session in (world.dialler, world.worker):
        session.on_time(world.now)
        assert (session.state, session.num_breaks) == (SessionState.OPEN, 0)


def test_an_idle_connection_stays_open_by_pings():
    world = connected_world()
    for _ in range(100):
        world.now += 0.25
        for session in (world.dialler, world.worker):
            session.on_time(world.now)
        world.flush()
        world.deliver_down(3)
        world.deliver_up(3)
        world.flush()
        world.deliver_up(3)
    assert world.dialler.state is world.worker.state is SessionState.OPEN
    assert world.dialler.num_breaks == 0
    assert world.dialler.num_round_trips > 10


def test_a_goodbye_closes_both_ends_behind_what_was_posted():
    world = connected_world()
    world.post_row(0)
    world.worker.leave("it ends", world.now)
    world.post_row(1)  # too late
    assert world.worker.state.value == "leaving"
    world.flush()
    world.deliver_up(3)
    assert world.up.applied_tokens == {1: [1]}
    assert world.dialler.state is SessionState.CLOSED
    assert world.dialler.end_reason == "it ends"
    world.cut(1)  # the router's driver closes the connection
    assert world.worker.state is SessionState.CLOSED
    assert world.worker.num_breaks == 0


def test_a_goodbye_that_nobody_hears_ends_in_time():
    world = connected_world()
    world.dialler.leave("it ends", world.now)
    woken_at = world.dialler.next_wakeup()
    assert woken_at is not None
    assert woken_at <= world.now + LIMITS.leave_s
    world.dialler.on_time(world.now + LIMITS.leave_s)
    assert world.dialler.state is SessionState.CLOSED
    assert world.dialler.next_wakeup() is None


def test_a_session_without_a_connection_is_left_at_once():
    world = connected_world()
    world.cut(2)
    world.dialler.leave("it ends", world.now)
    assert world.dialler.state is SessionState.CLOSED


def test_two_goodbyes_that_cross_close_both_ends():
    world = connected_world()
    world.dialler.leave("the router ends", world.now)
    world.worker.leave("the worker ends", world.now)
    world.flush()
    world.deliver_down(3)
    world.deliver_up(3)
    assert world.dialler.state is world.worker.state is SessionState.CLOSED


def test_a_busy_connection_is_probed_now_and_then():
    world = connected_world()
    for index in range(100):
        world.now += 0.2
        world.post_row(index)
        world.post_down(index)
        world.flush()
        world.deliver_down(3)
        world.deliver_up(3)
        world.flush()
        world.deliver_up(3)
    assert 3 <= world.worker.num_round_trips <= 5
    assert world.worker.rtt_s == pytest.approx(0.2), "a ping is read one round later"


def test_a_session_that_was_lost_here_does_not_begin_again():
    world = connected_world()
    world.worker.lose("scripted")
    world.acceptor.remove_ended()
    world.dialler.broken(world.now)
    world.dialler.established = False  # as if no frame of the worker had arrived
    world.dial()
    world.deliver_down(0)
    world.deliver_up(0)
    assert world.dialler.state is SessionState.LOST


def test_a_full_window_makes_rows_longer_not_more():
    world = connected_world()
    for _ in range(2000):
        for stream in range(3):
            world.post_row(stream)
        world.worker.take(world.now)  # written, never acknowledged
    assert world.worker.outbox.retained_bytes < 2 * LIMITS.outbox.window_bytes
    assert len(world.worker.outbox._waiting) == 3
    world.dialler.broken(world.now)
    world.worker.broken(world.now)
    world.settle()
    assert world.up.is_complete
    assert len(world.up.applied_tokens[1]) == 2000


def test_prompt_parts_do_not_hold_up_an_abort():
    outbox = Outbox(OutboxLimits(frame_bytes=200))
    for stream in (1, 2):
        for _ in range(3):
            outbox.post(pb.StreamMessage(stream=stream, prompt=pb.PromptPart(tokens=bytes(150))))
    outbox.post(pb.StreamMessage(stream=2, abort=pb.Abort(reason="gone")))
    frames = []
    while (body := outbox.take()) is not None:
        frames.append([(m.stream, m.WhichOneof("kind")) for m in pb.Frame.FromString(body).messages])
    assert frames[0][0] == (2, "abort")
    assert [m for frame in frames for m in frame][1:] == 3 * [(1, "prompt")], "the aborted prompt is not sent"
    assert outbox.waiting_bytes == 0


FRAMES_THAT_NO_PEER_SENDS = (
    pb.Frame(seq=4),
    pb.Frame(seq=2, ack=90),
    pb.Frame(messages=[pb.StreamMessage(abort=pb.Abort())]),
    pb.Frame(seq=2, messages=[pb.StreamMessage(ended=pb.Ended())]),
    pb.Frame(seq=2, messages=[pb.StreamMessage(stream=4)]),
)


@pytest.mark.parametrize("frame", FRAMES_THAT_NO_PEER_SENDS)
def test_a_well_tagged_frame_against_the_protocol_breaks_the_connection(frame: pb.Frame):
    listener = MessageSession(5, ROUTER_KINDS, LIMITS, 0.0)
    keys = ConnectionKeys(b"a" * 32, b"b" * 32)
    tagger = FrameTagger(keys.received)
    listener.connected(keys, 0, 0.0)
    body = pb.Frame(seq=1, messages=[pb.StreamMessage(stream=1, abort=pb.Abort())]).SerializeToString()
    assert len(listener.receive(pb.SessionMessage(body=body, tag=tagger.tag(body)), 0.0)) == 1
    body = frame.SerializeToString()
    with pytest.raises(BadFrame):
        listener.receive(pb.SessionMessage(body=body, tag=tagger.tag(body)), 0.0)
    assert listener.state is SessionState.BROKEN
    assert listener.last_applied_seq == 1


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=40), st.integers(0, 2))
def test_any_bytes_are_refused_at_every_step(body: bytes, tag: bytes, step: int):
    """Fuzz: a stranger's bytes raise `LinkBroken`, and apply nothing."""
    world = SessionWorld()
    world.dial()
    message = pb.SessionMessage(body=body, tag=tag)
    if step == 0:
        with pytest.raises(HandshakeFailed):
            world.acceptor.on_hello(message, bytes(16))
    elif step == 1:
        with pytest.raises(HandshakeFailed):
            world.connections[0].handshake.on_challenge(message)
    else:
        offered = world.acceptor.on_hello(world.connections[0].handshake.hello(), bytes(16))
        assert isinstance(offered, OfferedConnection)
        with pytest.raises(HandshakeFailed):
            world.acceptor.on_proof(offered, message, 0.0)
    assert world.acceptor.sessions == ()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [("protocol_version", 99, "version"), ("listener_incarnation", 1, "incarnation"), ("role", 0, "role")],
)
def test_a_hello_that_does_not_fit_is_refused_by_name(field: str, value: int, why: str):
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION, role=pb.SESSION_ROLE_ROUTER, id="r", incarnation=9,
        listener_incarnation=INCARNATION, session_id=5, connection=1, nonce=bytes(16),
    )  # fmt: skip
    setattr(hello, field, value)
    handshake = DiallerHandshake(OPEN_SESSION_KEY, hello)
    answer = Acceptor((OPEN_SESSION_KEY,), INCARNATION, LIMITS).on_hello(handshake.hello(), bytes(16))
    assert isinstance(answer, pb.SessionMessage)
    with pytest.raises(SessionRefused, match=why):
        handshake.on_challenge(answer)


def test_another_secret_is_refused_before_anything_is_kept():
    world = SessionWorld()
    world.acceptor = Acceptor((b"another",), INCARNATION, LIMITS)
    world.dial()
    world.deliver_down(0)
    assert not world.connections[0].listener_open
    assert world.acceptor.sessions == ()


def test_a_new_incarnation_of_a_dialler_ends_its_old_session():
    replaced: list[AcceptedSession] = []
    world = connected_world()
    world.acceptor._on_replaced = replaced.append
    old, world.listener = world.worker, None
    world.dialler = MessageSession(6, WORKER_KINDS, LIMITS, world.now)
    world.post_down(0)
    world.dial()
    world.settle()
    assert [one.session for one in replaced] == [old]
    assert old.state is SessionState.LOST
    assert len(world.acceptor.sessions) == 1
