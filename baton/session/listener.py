"""Serves the connections of a process's listener: handshakes, sessions by dialler, and their ends.

A connection has 5 s for its handshake, and there are 64 at most that have not ended it: a stranger costs no more.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

import structlog

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc.gen import session_pb2 as pb
from baton.session.acceptor import AcceptedSession, Acceptor
from baton.session.handshake import HandshakeFailed, OfferedConnection
from baton.session.pump import SessionPump
from baton.session.session import MessageSession, SessionLimits
from baton.session.tags import NONCE_BYTES, session_keys
from baton.session.wires.wire import WireConnection

HANDSHAKE_TIMEOUT_S = 5.0
MAX_HALF_OPEN = 64

log = structlog.get_logger(__name__)


class SessionOwner(Protocol):
    """What a process does with one session: its streams."""

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        """Handles the messages of a frame. Must not raise or wait."""
        ...

    def on_ended(self, reason: str) -> None:
        """The session was lost or closed: ends its streams. Called once."""
        ...


class SessionListener:
    """Owned by one event loop. `make_owner` is called for each new session of a router, `make_link_owner` for each of a
    worker; None: workers are refused.
    """

    def __init__(
        self,
        trust: ClusterTrust,
        incarnation: Incarnation,
        limits: SessionLimits,
        make_owner: Callable[[SessionPump], SessionOwner],
        make_link_owner: Callable[[SessionPump], SessionOwner] | None = None,
    ) -> None:
        self._makers = {pb.SESSION_ROLE_ROUTER: make_owner}
        if make_link_owner is not None:
            self._makers[pb.SESSION_ROLE_WORKER] = make_link_owner
        self._acceptor = Acceptor(session_keys(trust), incarnation, limits, self._on_replaced, self._makers)
        self._served: dict[MessageSession, _ServedSession] = {}
        self._num_half_open = 0
        self._closed = False
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def num_sessions(self) -> int:
        """Sessions that have not ended."""
        return len(self._served)

    async def serve(self, connection: WireConnection) -> None:
        """Serves one connection until it ends."""
        if self._closed:
            return
        if self._num_half_open >= MAX_HALF_OPEN:
            log.warning("session_refused", why="too many connections have not proved themselves")
            return
        self._num_half_open += 1
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                accepted = await self._shake_hands(connection)
        except (LinkBroken, TimeoutError) as error:
            log.warning("session_refused", why=str(error) or "the handshake has not ended in time")
            return
        finally:
            self._num_half_open -= 1
        if accepted is not None and not self._closed:
            await self._serve_of(accepted).pump.run(connection)

    async def leave(self, reason: str) -> None:
        """Ends all sessions as planned: their diallers hear a goodbye, or `leave_s` passes. Serves no more."""
        self._closed = True
        for served in list(self._served.values()):
            served.pump.leave(reason)
        while self._served:
            self._ended.clear()
            await self._ended.wait()

    def close(self) -> None:
        """Ends all sessions and their connections, and serves no more."""
        self._closed = True
        for session in list(self._served):
            session.lose("this process ends")
            self._end(session)

    async def _shake_hands(self, connection: WireConnection) -> AcceptedSession | None:
        answer = self._acceptor.on_hello(await _receive(connection), secrets.token_bytes(NONCE_BYTES))
        if not isinstance(answer, OfferedConnection):
            await connection.send(answer)
            return None
        await connection.send(answer.message)
        return self._acceptor.on_proof(answer, await _receive(connection), self._loop.time())

    def _serve_of(self, accepted: AcceptedSession) -> _ServedSession:
        session = accepted.session
        served = self._served.get(session)
        if served is None:
            served = self._served[session] = _ServedSession(session, self._makers[accepted.role], self._on_change)
            log.info("session_opened", dialler=accepted.dialler)
        return served

    def _on_change(self) -> None:
        for accepted in self._acceptor.remove_ended():
            self._end(accepted.session)

    def _on_replaced(self, accepted: AcceptedSession) -> None:
        self._end(accepted.session)

    def _end(self, session: MessageSession) -> None:
        served = self._served.pop(session, None)
        if served is not None:
            served.pump.close()
            log.info("session_ended", state=session.state.value, reason=session.end_reason)
            served.owner.on_ended(session.end_reason)
            self._ended.set()


class _ServedSession:
    """A session with its pump and its owner."""

    def __init__(
        self,
        session: MessageSession,
        make_owner: Callable[[SessionPump], SessionOwner],
        on_change: Callable[[], None],
    ) -> None:
        self.pump = SessionPump(session, self._apply, on_change)
        self.owner = make_owner(self.pump)
        self.pump.start()

    def _apply(self, messages: list[pb.StreamMessage]) -> None:
        self.owner.apply(messages)


async def _receive(connection: WireConnection) -> pb.SessionMessage:
    message = await connection.receive()
    if message is None:
        raise HandshakeFailed("the connection ended within the handshake")
    return message
