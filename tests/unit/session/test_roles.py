"""The role of a dialler limits what it may send, and tells its sessions from those of another role."""

from __future__ import annotations

import pytest

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER
from baton.rpc.gen import common_pb2, handoff_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.version import PROTOCOL_VERSION
from baton.session.acceptor import ALL_ROLES, AcceptedSession, Acceptor
from baton.session.handshake import DiallerHandshake, OfferedConnection
from baton.session.lifecycle import ENDED_STATES
from baton.session.session import LISTENER_KINDS, BadFrame, MessageSession, SessionLimits
from baton.session.tags import session_keys

ROUTER, WORKER = pb.SESSION_ROLE_ROUTER, pb.SESSION_ROLE_WORKER
KEY, INCARNATION, LIMITS = session_keys(OPEN_CLUSTER)[0], Incarnation(77), SessionLimits()
WATCH = pb.StreamMessage(stream=1, link_request=pb.LinkRequest(watch=handoff_pb2.WatchRequest()))
RESERVE = pb.StreamMessage(stream=1, reserve=pb.OpenReserve())
ABORT_ATTEMPT = pb.StreamMessage(abort_attempt=common_pb2.AbortRequest())


def acceptor(roles: frozenset[pb.SessionRole] = ALL_ROLES) -> Acceptor:
    return Acceptor((KEY,), INCARNATION, LIMITS, roles=roles)


def dial(
    listener: Acceptor, role: pb.SessionRole, session_id: int = 1
) -> tuple[MessageSession, AcceptedSession] | None:
    """Both ends of a session of the dialler `same`; None if it was refused."""
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION, role=role, id="same", incarnation=9, listener_incarnation=INCARNATION,
        session_id=session_id, connection=1, nonce=bytes(16),
    )  # fmt: skip
    handshake = DiallerHandshake(KEY, hello)
    offered = listener.on_hello(handshake.hello(), bytes(16))
    if not isinstance(offered, OfferedConnection):
        return None
    dialled = handshake.on_challenge(offered.message)
    accepted = listener.on_proof(offered, dialled.proof, 0.0)
    session = MessageSession(session_id, LISTENER_KINDS[role], LIMITS, 0.0)
    session.connected(dialled.keys, dialled.peer_applied, 0.0)
    return session, accepted


def carry(sender: MessageSession, receiver: MessageSession, message: pb.StreamMessage) -> list[pb.StreamMessage]:
    sender.post(message)
    frame = sender.take(0.0)
    assert frame is not None
    return receiver.receive(frame, 0.0)


@pytest.mark.parametrize(("role", "own"), [(ROUTER, RESERVE), (ROUTER, ABORT_ATTEMPT), (WORKER, WATCH)])
def test_a_dialler_may_send_what_its_role_may(role: pb.SessionRole, own: pb.StreamMessage):
    dialled = dial(acceptor(), role)
    assert dialled is not None
    assert carry(dialled[0], dialled[1].session, own) == [own]


@pytest.mark.parametrize(("role", "other"), [(WORKER, RESERVE), (WORKER, ABORT_ATTEMPT), (ROUTER, WATCH)])
def test_a_dialler_may_not_send_what_another_role_may(role: pb.SessionRole, other: pb.StreamMessage):
    dialled = dial(acceptor(), role)
    assert dialled is not None
    with pytest.raises(BadFrame, match="role"):
        carry(dialled[0], dialled[1].session, other)
    assert dialled[1].session.last_applied_seq == 0


@pytest.mark.parametrize(
    ("role", "reply"),
    [
        (WORKER, pb.StreamMessage(stream=1, step=pb.StepTokens())),
        (ROUTER, pb.StreamMessage(stream=1, link_reply=pb.LinkReply())),
    ],
)
def test_a_listener_may_not_reply_what_another_role_asks(role: pb.SessionRole, reply: pb.StreamMessage):
    dialled = dial(acceptor(), role)
    assert dialled is not None
    with pytest.raises(BadFrame, match="role"):
        carry(dialled[1].session, dialled[0], reply)


def test_a_router_and_a_worker_of_one_id_have_a_session_each():
    listener = acceptor()
    router, worker = dial(listener, ROUTER, 1), dial(listener, WORKER, 2)
    assert router is not None
    assert worker is not None
    assert {one.session.state for one in listener.sessions} & ENDED_STATES == set()
    assert len(listener.sessions) == 2
    worker[1].session.lose("a test")
    assert listener.remove_ended() == [worker[1]]
    assert [*listener.sessions] == [router[1]]


def test_a_role_that_is_not_served_is_refused():
    listener = acceptor(frozenset({ROUTER}))
    assert dial(listener, WORKER) is None
    assert dial(listener, pb.SESSION_ROLE_UNSPECIFIED) is None
    assert dial(listener, ROUTER) is not None
