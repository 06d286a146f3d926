"""The contract of `baton.session.wires.wire` for every wire, and sessions over each: resets, loss, and secrets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust, TlsIdentity
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.server import ServerAuth, start_server
from baton.session.dialler import DialledPeer, SessionDialler
from baton.session.lifecycle import SessionState
from baton.session.listener import SessionListener
from baton.session.pump import SessionPump
from baton.session.session import SessionLimits
from baton.session.wires.grpc_wire import GrpcWire, SessionServicer, add_session_servicer
from baton.session.wires.memory_wire import MemoryWire
from baton.session.wires.socket_server import SessionEndpoint, SocketServer
from baton.session.wires.socket_wire import SocketWire
from baton.session.wires.wire import Serve, Wire, WireConnection
from tests.certificates import CertificateAuthority

WAIT_S = 30.0
INCARNATION = Incarnation(77)
LIMITS = SessionLimits(ping_s=0.2, silent_s=10.0, resume_s=10.0, leave_s=10.0)
"""A machine that stands still for a moment ends no session."""


@dataclass
class WireRig:
    """A wire and a listener on it."""

    wire: Wire
    trust: ClusterTrust
    listen: Callable[[Serve], Awaitable[str]]
    stop: Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def memory_rig() -> AsyncIterator[WireRig]:
    wire = MemoryWire()

    async def listen(serve: Serve) -> str:
        wire.listen("here", serve)
        return "here"

    async def stop() -> None:
        await wire.close()

    yield WireRig(wire, OPEN_CLUSTER, listen, stop)
    await wire.close()


@contextlib.asynccontextmanager
async def grpc_rig(trust: ClusterTrust) -> AsyncIterator[WireRig]:
    wire, servers = GrpcWire(trust), []

    async def listen(serve: Serve) -> str:
        def register(server) -> None:
            add_session_servicer(SessionServicer(serve), server)

        servers.append(await start_server("127.0.0.1", 0, register, ServerAuth(INCARNATION, trust)))
        return f"127.0.0.1:{servers[-1].port}"

    async def stop() -> None:
        while servers:
            await servers.pop().stop(0.0)

    yield WireRig(wire, trust, listen, stop)
    await stop()
    await wire.close()


@contextlib.asynccontextmanager
async def socket_rig(trust: ClusterTrust) -> AsyncIterator[WireRig]:
    servers: list[SocketServer] = []

    async def listen(serve: Serve) -> str:
        servers.append(SocketServer(serve, trust, INCARNATION, SessionEndpoint()))
        await servers[-1].start()
        return f"127.0.0.1:{servers[-1].port}"

    async def stop() -> None:
        while servers:
            await servers.pop().close()

    yield WireRig(SocketWire(trust), trust, listen, stop)
    await stop()


@pytest.fixture(params=["memory", "grpc", "grpc-tls", "socket", "socket-secret"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[WireRig]:
    if request.param == "memory":
        async with memory_rig() as made:
            yield made
        return
    trust = OPEN_CLUSTER
    if request.param.startswith("socket"):
        async with socket_rig(ClusterTrust(b"secret" * 6) if request.param == "socket-secret" else trust) as made:
            yield made
        return
    if request.param == "grpc-tls":
        issued = CertificateAuthority.make(tmp_path).issue("worker")
        parts = [path.read_bytes() for path in (issued.certificate, issued.key, issued.authorities)]
        trust = ClusterTrust(b"secret" * 6, TlsIdentity(*parts))
    async with grpc_rig(trust) as made:
        yield made


def message(text: str, num_bytes: int = 0) -> pb.SessionMessage:
    return pb.SessionMessage(body=text.encode() + bytes(num_bytes), tag=b"t")


async def test_messages_arrive_in_order_in_both_directions(rig: WireRig):
    async def echo(connection: WireConnection) -> None:
        while (received := await connection.receive()) is not None:
            await connection.send(received)

    async with asyncio.timeout(WAIT_S):
        connection = await rig.wire.connect(await rig.listen(echo), INCARNATION)
        for number in range(50):
            await connection.send(message(str(number)))
        assert [await connection.receive() for _ in range(50)] == [message(str(number)) for number in range(50)]
        await connection.send(message("large", 1 << 20))
        assert await connection.receive() == message("large", 1 << 20)
        connection.close()


async def test_a_close_ends_both_ends(rig: WireRig):
    ended = asyncio.Event()

    async def serve(connection: WireConnection) -> None:
        await connection.send(message("hello"))
        with contextlib.suppress(asyncio.CancelledError):
            assert await connection.receive() is None
        ended.set()

    async with asyncio.timeout(WAIT_S):
        connection = await rig.wire.connect(await rig.listen(serve), INCARNATION)
        assert await connection.receive() == message("hello")
        connection.close()
        connection.close()
        assert await connection.receive() is None
        with pytest.raises(LinkBroken):
            await connection.send(message("late"))
        await ended.wait()


async def test_a_served_connection_ends_with_its_handler(rig: WireRig):
    async def serve(connection: WireConnection) -> None:
        await connection.send(message("bye"))

    async with asyncio.timeout(WAIT_S):
        connection = await rig.wire.connect(await rig.listen(serve), INCARNATION)
        assert await connection.receive() == message("bye")
        assert await connection.receive() is None
        connection.close()


async def test_nobody_listens(rig: WireRig):
    with pytest.raises(LinkBroken):
        await rig.wire.connect("127.0.0.1:1", INCARNATION)


async def test_a_writer_waits_for_a_reader_that_stands_still(rig: WireRig):
    go_on = asyncio.Event()

    async def serve(connection: WireConnection) -> None:
        await go_on.wait()
        while await connection.receive() is not None:
            pass

    async with asyncio.timeout(WAIT_S):
        connection = await rig.wire.connect(await rig.listen(serve), INCARNATION)
        num_sent = 0
        while num_sent < 400 and await sends_within(connection, 0.5):
            num_sent += 1
        assert num_sent < 400
        go_on.set()
        connection.close()


async def sends_within(connection: WireConnection, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await connection.send(message("", 64 << 10))
    except TimeoutError:
        return False
    return True


@dataclass
class RecordingOwner:
    """Keeps what one end has applied."""

    pump: SessionPump | None = None
    aborts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        for one in messages:
            if one.HasField("abort"):
                self.aborts.append(one.stream)
            for row in one.step.rows:
                assert row.first_index == len(self.tokens)
                self.tokens.extend(row.tokens)
        self.changed.set()

    def on_ended(self, reason: str) -> None:
        self.reason = reason
        self.changed.set()

    async def has_tokens(self, num: int) -> None:
        await self.until(lambda: len(self.tokens) == num)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class SessionRig:
    """A session from a dialler to a listener, whose current connection can be cut."""

    def __init__(self, rig: WireRig, dialler_trust: ClusterTrust | None = None, limits: SessionLimits = LIMITS) -> None:
        self.rig = rig
        self._limits = limits
        self.owners: list[RecordingOwner] = []
        self.listener = SessionListener(rig.trust, INCARNATION, limits, self._make_owner)
        self.router = RecordingOwner()
        self.served: list[WireConnection] = []
        self._trust = dialler_trust or rig.trust
        self.new_owner = asyncio.Event()

    async def start(self) -> None:
        self._address = await self.rig.listen(self._serve)
        self.dial()

    def dial(self) -> None:
        """Begins a session of the dialler."""
        peer = DialledPeer(self._address, INCARNATION, "router-0", Incarnation(9))
        self.dialler = SessionDialler(self.rig.wire, self._trust, peer, self._limits)
        self.task = asyncio.create_task(self.dialler.run(self.router))

    async def worker(self) -> RecordingOwner:
        async with asyncio.timeout(WAIT_S):
            await self.new_owner.wait()
        return self.owners[0]

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.listener.close()

    async def opens_anew(self) -> None:
        """The dialler, whose session has ended, begins another one, which works."""
        await asyncio.gather(self.task, return_exceptions=True)
        num_owners, self.router = len(self.owners), RecordingOwner()
        self.dial()
        async with asyncio.timeout(WAIT_S):
            while len(self.owners) == num_owners:
                self.new_owner.clear()
                await self.new_owner.wait()
        self.post_token(self.owners[-1], 0)
        await self.router.has_tokens(1)

    def post_token(self, worker: RecordingOwner, index: int) -> None:
        assert worker.pump is not None
        worker.pump.post_rows([pb.TokenRow(stream=1, first_index=index, tokens=[index])])

    async def _serve(self, connection: WireConnection) -> None:
        self.served.append(connection)
        await self.listener.serve(connection)

    def _make_owner(self, pump: SessionPump) -> RecordingOwner:
        self.owners.append(RecordingOwner(pump))
        self.new_owner.set()
        return self.owners[-1]


@pytest.fixture
async def session(rig: WireRig, request: pytest.FixtureRequest) -> AsyncIterator[SessionRig]:
    made = SessionRig(rig, limits=getattr(request, "param", LIMITS))
    await made.start()
    yield made
    await made.stop()


async def test_what_was_posted_arrives_over_many_resets(session: SessionRig):
    worker = await session.worker()
    for index in range(300):
        session.post_token(worker, index)
        session.dialler.pump.post(pb.StreamMessage(stream=index + 1, abort=pb.Abort()))
        if index % 60 == 30:
            session.served[-1].close()
        await asyncio.sleep(0)
        if index % 60 == 59:
            await session.router.has_tokens(index + 1)
    await session.router.until(lambda: session.router.tokens == list(range(300)))
    await worker.until(lambda: worker.aborts == list(range(1, 301)))
    assert len(session.owners) == 1, "one session over all its connections"
    assert session.dialler.session.num_breaks >= 5
    assert session.router.reason is None


@pytest.mark.parametrize("session", [replace(LIMITS, resume_s=0.8)], indirect=True, ids=["resume 0.8 s"])
async def test_a_session_is_lost_at_both_ends_when_its_listener_is_gone(session: SessionRig):
    worker = await session.worker()
    await session.rig.stop()
    await session.router.until(lambda: session.router.reason is not None)
    assert session.dialler.session.state is SessionState.LOST
    await worker.until(lambda: worker.reason is not None)


async def test_an_idle_session_stays(session: SessionRig):
    """Its pings are answered. A connection whose are not is broken (`tests/property/session`)."""
    await session.worker()
    for _ in range(int(WAIT_S / LIMITS.ping_s)):
        if session.dialler.session.num_round_trips >= 3:
            break
        await asyncio.sleep(LIMITS.ping_s)
    assert session.dialler.session.num_round_trips >= 3
    assert session.dialler.session.state is SessionState.OPEN
    assert session.dialler.session.num_breaks == 0


async def test_a_listener_that_leaves_closes_its_sessions(session: SessionRig):
    worker = await session.worker()
    session.post_token(worker, 0)
    async with asyncio.timeout(WAIT_S):
        await session.listener.leave("the worker leaves")
        await session.task
    assert session.router.tokens == [0]
    assert session.router.reason == "the worker leaves"
    assert session.dialler.session.state is SessionState.CLOSED, "planned, and not lost"
    assert session.listener.num_sessions == 0


async def test_a_dialler_that_leaves_ends_the_streams_at_once(session: SessionRig):
    worker = await session.worker()
    session.post_token(worker, 0)
    await session.router.has_tokens(1)  # so it is open at both ends
    async with asyncio.timeout(WAIT_S):
        session.dialler.pump.leave("the router leaves")
        await session.task
        await worker.until(lambda: worker.reason is not None)
    assert worker.reason == "the router leaves", "heard, not lost"


async def test_after_a_frame_that_cannot_be_made_a_session_is_opened_anew(session: SessionRig):
    worker = await session.worker()
    session.post_token(worker, 0)
    await session.router.has_tokens(1)
    assert worker.pump is not None
    worker.pump.post_tokens(1, 1, [-1])
    await worker.until(lambda: worker.reason is not None)
    assert worker.reason == "a frame could not be made: ValueError"
    await session.router.until(lambda: session.router.reason is not None)
    await session.opens_anew()


@pytest.mark.parametrize("at_worker", [True, False])
async def test_after_a_bug_of_a_handler_a_session_is_opened_anew(session: SessionRig, at_worker: bool):
    def fail(messages: list[pb.StreamMessage]) -> None:
        raise LinkBroken("another link has ended")

    worker = await session.worker()
    session.post_token(worker, 0)
    await session.router.has_tokens(1)
    assert worker.pump is not None
    if at_worker:
        worker.apply = fail  # type: ignore[method-assign]
        session.dialler.pump.post(pb.StreamMessage(stream=1, abort=pb.Abort()))
    else:
        session.dialler.pump.apply = fail
        session.post_token(worker, 1)
    await session.router.until(lambda: session.router.reason is not None)
    await session.opens_anew()
    await worker.until(lambda: worker.reason is not None)


async def test_another_secret_gets_no_session(rig: WireRig):
    stranger = SessionRig(rig, ClusterTrust(b"another" * 5, rig.trust.tls), replace(LIMITS, dial_s=1.0))
    await stranger.start()
    await stranger.router.until(lambda: stranger.router.reason is not None)
    assert stranger.owners == []
    await stranger.stop()
