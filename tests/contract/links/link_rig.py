"""An importer and an exporter with every real part between their engines: by calls, or in a session over a wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc

from baton.domain.errors import BatonError
from baton.domain.fingerprint import Fingerprint, FingerprintPart
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, Incarnation, PageId, PageKey, RequestId, WorkerId
from baton.domain.request import SampledToken
from baton.domain.timing.attempt_times import PrefillTimes
from baton.domain.trust import ClusterTrust
from baton.domain.worker import LinkRecord
from baton.engine.handoff.export_commands import (
    CommitExport,
    ExportCommand,
    OpenExport,
    ReleaseExport,
    RenewalAnswer,
    RenewLeases,
)
from baton.engine.handoff.export_events import Seal
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import handoff_pb2, handoff_pb2_grpc
from baton.rpc.server import RunningServer, ServerAuth, start_server
from baton.services.decode.handoff_client import HandoffClient
from baton.session.session import SessionLimits
from baton.session.wires.grpc_wire import GrpcWire, SessionServicer, add_session_servicer
from baton.session.wires.memory_wire import MemoryWire
from baton.session.wires.socket_server import SessionEndpoint, SocketServer
from baton.session.wires.wire import Wire, WireConnection
from baton.worker.handoff.export_client import ExportClient
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_log import HandoffEvent, HandoffLog
from baton.worker.handoff.handoff_server import HandoffServicer
from baton.worker.handoff.link_sessions import LinkSessions
from baton.worker.handoff.links import PeerLink
from baton.worker.handoff.session_or_call import PeerClients
from baton.worker.request_validator import EngineRequestValidator
from baton.worker.sessions.listener import listen_for_sessions
from baton.worker.sessions.session_handlers import SessionHandlers

WAIT_S = 30.0
WAYS = ("calls", "session-memory", "session-grpc", "session-socket")
TRUST = ClusterTrust(b"secret" * 6)
INCARNATION = Incarnation(77)
LIMITS = SessionLimits(ping_s=0.2, silent_s=10.0, resume_s=10.0)
"""A machine that stands still for a moment ends no session."""
FINGERPRINT = Fingerprint((FingerprintPart("root", "1"),))
ONE, TWO = (AttemptId(RequestId(name), 1) for name in ("one", "two"))
KEY = PageKey(bytes(16))


def chunk(id: AttemptId, first_page: int) -> PublishedChunk:
    return PublishedChunk(id, first_page, (PageId(first_page + 10), PageId(first_page + 20)), (5, 6))


def seal(id: AttemptId) -> Seal:
    return Seal(id, 0, SampledToken(7), None, 4, PrefillTimes(1, 2, 3, (), 4, 5))


class Recorder:
    """A mailbox that keeps what it gets. `until` waits for it without polling."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self._changed = asyncio.Event()

    def put(self, command: Any) -> None:
        self.commands.append(command)
        self._changed.set()

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    async def until(self, kind: type, num: int = 1) -> list[Any]:
        async with asyncio.timeout(WAIT_S):
            while len(found := self.of(kind)) < num:
                self._changed.clear()
                await self._changed.wait()
        return found


class ExportEngine(Recorder):
    """Answers as an exporter's engine, at once unless `holds_commits` or `holds_renewals`. `valid`: of every commit."""

    def __init__(self) -> None:
        super().__init__()
        self.valid, self.holds_commits, self.holds_renewals = True, False, False
        self.order: list[str] = []
        self.renewal = RenewalAnswer(())
        self.given: PublishedChunk | BatonError = chunk(ONE, 0)

    def put(self, command: ExportCommand) -> None:
        if isinstance(command, ReleaseExport):
            self.order.append("release")
        match command:
            case CommitExport(_, reply) if not self.holds_commits:
                reply.send(self.valid)
            case RenewLeases(_, renewal_reply, _) if not self.holds_renewals:
                renewal_reply.send(self.renewal)
            case ReleaseExport(_, _, _, verdict_reply) if verdict_reply is not None:
                verdict_reply.send(None)
            case OpenExport():
                command.reply.send(self.given)
        super().put(command)


class ObservedLog(HandoffLog):
    """Tells which watches have ended. `order`: gets what begins here."""

    def __init__(self, ended: Recorder, order: list[str]) -> None:
        super().__init__()
        self._ended, self._order = ended, order

    async def watch(self, id: AttemptId, timeout_s: float) -> AsyncGenerator[HandoffEvent, None]:
        self._order.append("watch")
        try:
            async with contextlib.aclosing(super().watch(id, timeout_s)) as events:
                async for event in events:
                    yield event
        finally:
            self._ended.put(id)


class LinkRig:
    """`links` of the importer is the rig itself: one link, to the exporter."""

    def __init__(self, wire: Wire | None, address: str, incarnation: Incarnation = INCARNATION) -> None:
        self.wire = wire
        self.engine, self.inbox = ExportEngine(), Recorder()
        self.ended_watches = Recorder()
        self.order = self.engine.order
        self.handoffs = ObservedLog(self.ended_watches, self.order)
        terms = LinkConfig(
            WorkerId("prefill-0"), INCARNATION, "m", FINGERPRINT, {"stream": b"x"}, 0, 8, 64, WAIT_S,
            granted_lease_s=3.0, gives_cached=True,
        )  # fmt: skip
        self.servicer = HandoffServicer(terms, self.engine, self.handoffs, None)
        self.listener = listen_for_sessions(SessionHandlers(), TRUST, INCARNATION, 64, self.servicer.handlers)
        self.served: list[WireConnection] = []
        self.socket: SocketServer | None = None
        self.channels = ChannelPool(TRUST)
        self.sessions = None
        if wire is not None:
            self.sessions = LinkSessions(wire, WorkerId("decode-0"), Incarnation(9), TRUST, LIMITS)
        self.stubs = PeerClients(self.channels, self.sessions)
        record = LinkRecord(WorkerId("prefill-0"), incarnation, "stream", 1e9, 64)
        self.link = PeerLink(record, address, "stream", in_session=wire is not None)
        self.client = HandoffClient(cast(Any, self), cast(Any, self.inbox), 60.0, EngineRequestValidator(100, 100))
        self.exports = ExportClient(cast(Any, self), self.inbox, 60.0)
        self.tasks: list[asyncio.Task[None]] = []
        self.stop: Callable[[], Awaitable[None]]

    def up(self) -> tuple[PeerLink, ...]:
        return (self.link,)

    def get(self, id: WorkerId, incarnation: Incarnation) -> PeerLink:
        return self.link

    def stub(self, link: PeerLink) -> Any:
        return self.stubs.get(
            link.address,
            link.record.prefill_incarnation,
            in_session=link.in_session,
            session_address=link.session_address,
        )

    def watch(self, id: AttemptId) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(self.client.watch(id, self.link)))
        return self.tasks[-1]

    def publish(self, id: AttemptId, *events: PublishedChunk | Seal | BatonError) -> None:
        for event in events:
            self.handoffs.append(id, event)

    async def serve(self, connection: WireConnection) -> None:
        self.served.append(connection)
        await self.listener.serve(connection)

    @property
    def wires(self) -> list[str]:
        """What carries each connection that has come."""
        return [connection.wire for connection in self.served]

    def reset(self) -> None:
        """Ends the newest connection."""
        self.served[-1].close()

    async def hello(self, *parts: FingerprintPart) -> handoff_pb2.HelloReply:
        request = handoff_pb2.HelloRequest(
            worker_id="decode-0", incarnation=9, protocol_version=1, fingerprint=Fingerprint(parts).digest, model="m",
            transports=["stream"],
            parts=[handoff_pb2.FingerprintPart(name=part.name, digest=part.digest) for part in parts],
        )  # fmt: skip
        return cast(handoff_pb2.HelloReply, await self.stub(self.link).Hello(request, timeout=WAIT_S))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.sessions is not None:
            await self.sessions.close()
        self.listener.close()
        await self.channels.close()


@contextlib.asynccontextmanager
async def link_rig(way: str, incarnation: Incarnation = INCARNATION) -> AsyncIterator[LinkRig]:
    """A rig whose importer asks in `way`, and addresses `incarnation`. `rig.stop` ends the exporter.

    By "session-socket" it has a port of sessions, `rig.socket`, and is reached by gRPC, too.
    """
    if way == "session-memory":
        memory = MemoryWire()
        rig = LinkRig(memory, "here", incarnation)
        memory.listen("here", rig.serve)
        rig.stop = memory.close
        yield rig
        await rig.close()
        await memory.close()
        return
    wire = None if way == "calls" else GrpcWire(TRUST)
    rig = LinkRig(wire, "", incarnation)

    def register(server: grpc.aio.Server) -> None:
        add_session_servicer(SessionServicer(rig.serve), server)
        handoff_pb2_grpc.add_HandoffServicer_to_server(rig.servicer, server)

    server = await start_server("127.0.0.1", 0, register, ServerAuth(INCARNATION, TRUST))
    rig.link = replace(rig.link, address=f"127.0.0.1:{server.port}")
    rig.stop = partial(server.stop, 0.0)
    if way == "session-socket":
        rig.socket = SocketServer(rig.serve, TRUST, INCARNATION, SessionEndpoint())
        await rig.socket.start()
        rig.link = replace(rig.link, session_address=rig.socket.address)
        rig.stop = partial(_stop_both, rig.socket, server)
    yield rig
    await rig.close()
    await rig.stop()
    if wire is not None:
        await wire.close()


async def _stop_both(socket: SocketServer, server: RunningServer) -> None:
    await socket.close()
    await server.stop(0.0)
