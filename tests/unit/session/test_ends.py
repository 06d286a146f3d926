"""Ends of sessions whose peer hangs in a handshake: both sides hear of them in time."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.version import PROTOCOL_VERSION
from baton.session.dialler import DialledPeer, SessionDialler
from baton.session.handshake import DiallerHandshake
from baton.session.lifecycle import SessionState
from baton.session.listener import HANDSHAKE_TIMEOUT_S, SessionListener
from baton.session.session import SessionLimits
from baton.session.tags import NONCE_BYTES, session_keys
from baton.session.wires.memory_wire import MemoryWire
from baton.session.wires.wire import WireConnection

LISTENER, ROUTER = Incarnation(7), Incarnation(9)
ADDRESS = "a:1"


class Owner:
    """Records the end of its session."""

    def __init__(self, *_: Any) -> None:
        self.ended = asyncio.Event()

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        raise AssertionError("nothing is sent here")

    def on_ended(self, reason: str) -> None:
        self.ended.set()


async def test_a_session_that_is_lost_ends_a_handshake_that_hangs():
    """A listener that accepts and never answers: attempts wait for the session's time, not for the handshake's too."""
    wire, owner = MemoryWire(), Owner()

    async def hang(_: WireConnection) -> None:
        await asyncio.Event().wait()

    wire.listen(ADDRESS, hang)
    peer = DialledPeer(ADDRESS, LISTENER, "router-0", ROUTER)
    dialler = SessionDialler(wire, OPEN_CLUSTER, peer, SessionLimits(dial_s=0.05))
    task = asyncio.create_task(dialler.run(owner))
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S / 2):
        await task
    assert owner.ended.is_set()
    assert dialler.session.state is SessionState.LOST
    await wire.close()


def handshake_of(connection: int) -> DiallerHandshake:
    """The dialler's side of a connection of one session, by hand."""
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        role=pb.SESSION_ROLE_ROUTER,
        id="router-0",
        incarnation=ROUTER,
        listener_incarnation=LISTENER,
        session_id=1,
        connection=connection,
        nonce=bytes(NONCE_BYTES),
    )
    return DiallerHandshake(session_keys(OPEN_CLUSTER)[0], hello)


async def challenged(wire: MemoryWire, handshake: DiallerHandshake) -> tuple[WireConnection, pb.SessionMessage]:
    """A connection whose `Hello` was answered, and the proof that it owes."""
    connection = await wire.connect(ADDRESS, LISTENER)
    await connection.send(handshake.hello())
    challenge = await connection.receive()
    assert challenge is not None
    return connection, handshake.on_challenge(challenge).proof


async def test_a_listener_that_closes_within_a_handshake_opens_no_session():
    wire = MemoryWire()
    listener = SessionListener(OPEN_CLUSTER, LISTENER, SessionLimits(), Owner)
    wire.listen(ADDRESS, listener.serve)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        connection, proof = await challenged(wire, handshake_of(1))
        listener.close()
        await connection.send(proof)
        assert await connection.receive() is None
    assert listener.num_sessions == 0
    await wire.close()


async def test_a_listener_that_leaves_within_a_handshake_refuses_it():
    """A router dials again while its earlier connection still counts as open; the worker leaves between."""
    wire, outcomes = MemoryWire(), asyncio.Queue[BaseException | None]()
    listener = SessionListener(OPEN_CLUSTER, LISTENER, SessionLimits(leave_s=2 * HANDSHAKE_TIMEOUT_S), Owner)

    async def serve(connection: WireConnection) -> None:
        (outcome,) = await asyncio.gather(listener.serve(connection), return_exceptions=True)
        outcomes.put_nowait(outcome)

    wire.listen(ADDRESS, serve)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        first, proof = await challenged(wire, handshake_of(1))
        await first.send(proof)
        assert await first.receive() is not None, "it is open"
        second, proof = await challenged(wire, handshake_of(2))
        leaves = asyncio.create_task(listener.leave("the worker leaves"))
        await asyncio.sleep(0)
        await second.send(proof)
        assert await second.receive() is None
        first.close()
        await leaves
        assert [await outcomes.get(), await outcomes.get()] == [None, None]
    await wire.close()
