"""Decides how a worker asks those whose pages it reads: in the session of one that serves it there, else by calls.

Both ways have the methods of `HandoffStub`, and end alike: what was asked in a session that is lost fails as a call
that broke.
"""

from __future__ import annotations

from collections.abc import Collection

import grpc

from baton.domain.errors import BatonError, LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord
from baton.rpc import codec
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import handoff_pb2, handoff_pb2_grpc
from baton.transfer.base import SourceInfo
from baton.worker.handoff.link_session import LinkSession
from baton.worker.handoff.link_sessions import LinkSessions

HELLO_TIMEOUT_S = 5.0

ASK_ERRORS = (grpc.aio.AioRpcError, BatonError)
"""What a question may raise; `error_of` tells what it means."""

HandoffPeer = handoff_pb2_grpc.HandoffStub | LinkSession


def error_of(error: grpc.aio.AioRpcError | BatonError) -> BatonError:
    """The error of a question that failed: the one that the peer named, otherwise `WorkerLost`."""
    return error if isinstance(error, BatonError) else codec.error_from_rpc(error)


class PeerClients:
    """Asks other workers. `sessions`: None asks all of them by calls."""

    def __init__(self, channels: ChannelPool, sessions: LinkSessions | None = None) -> None:
        self._channels = channels
        self._sessions = sessions

    @property
    def trust(self) -> ClusterTrust:
        """What records and calls are verified with."""
        return self._channels.trust

    def in_session(self, worker: WorkerRecord) -> bool:
        """True if a worker is asked in a session."""
        return self._sessions is not None and self._sessions.serves(worker)

    def get(
        self, address: str, incarnation: Incarnation, *, in_session: bool, session_address: str = ""
    ) -> HandoffPeer:
        """What asks a worker. `session_address`: of its port for sessions, as announced; "": it has none."""
        if in_session and self._sessions is not None:
            return self._sessions.get(address, incarnation, session_address)
        return handoff_pb2_grpc.HandoffStub(self._channels.get(address, incarnation))

    def end(self, incarnation: Incarnation, reason: str) -> None:
        """Ends the session with a worker whose link is down, if there is one."""
        if self._sessions is not None:
            self._sessions.end(incarnation, reason)

    def retain(self, incarnations: Collection[Incarnation]) -> None:
        """Forgets what was learnt about workers other than `incarnations`."""
        if self._sessions is not None:
            self._sessions.retain(incarnations)

    async def hello(
        self, worker: WorkerRecord, request: handoff_pb2.HelloRequest, *, optional: bool
    ) -> SourceInfo | None:
        """The memory and transport of a worker. None if it gives no pages and is `optional`. Raises `BatonError`."""
        in_session, port = self.in_session(worker), worker.session_address
        peer = self.get(worker.address, worker.incarnation, in_session=in_session, session_address=port)
        try:
            reply = await peer.Hello(request, timeout=HELLO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if optional and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise codec.error_from_rpc(error) from error
        if reply.WhichOneof("reply") != "source":
            raise codec.decode_failure(reply.refused)
        return _check_source(reply.source, worker)


def _check_source(source: handoff_pb2.SourceInfo, worker: WorkerRecord) -> SourceInfo:
    """The peer's memory and transport. Raises `LinkBroken` if another worker answered."""
    if (source.worker_id, source.incarnation) != (worker.id, worker.incarnation):
        raise LinkBroken(f"{worker.id} answered as another worker, {source.worker_id[:120]!r}")
    return SourceInfo(
        worker.id, worker.incarnation, worker.address, source.transport,
        source.metadata, source.base_address, source.num_pages, source.page_bytes,
        source.window_base_address, source.num_window_slots, source.window_bytes,
    )  # fmt: skip
