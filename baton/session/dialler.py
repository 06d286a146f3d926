"""Keeps one session to a listener connected: dials, proves, redials after a break, and tells when the session is lost.

dial at once, then after 50, 100, 200, 400 ms ...; two refusals in a row end the session: its process is gone
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import structlog

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.version import PROTOCOL_VERSION
from baton.session.handshake import DiallerHandshake, HandshakeFailed, SessionRefused
from baton.session.lifecycle import ENDED_STATES
from baton.session.listener import HANDSHAKE_TIMEOUT_S, SessionOwner
from baton.session.pump import SessionPump
from baton.session.session import LISTENER_KINDS, MessageSession, SessionLimits
from baton.session.tags import NONCE_BYTES, session_keys
from baton.session.wires.wire import CONNECT_TIMEOUT_S, ConnectionRefused, Wire, WireConnection

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 0.4
REFUSED_PAUSE_S = 0.1
MAX_REFUSED_DIALS = 2
"""Dials in a row that nobody answered, 100 ms apart: a proxy may restart, a killed process stays away."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DialledPeer:
    """Where a session goes, and who dials it. `id` and `role`: of the dialling process."""

    address: str
    listener_incarnation: Incarnation
    id: str
    incarnation: Incarnation
    role: pb.SessionRole = pb.SESSION_ROLE_ROUTER


class SessionDialler:
    """One session of a router or a worker. Owned by one event loop; `run` ends with the session."""

    def __init__(self, wire: Wire, trust: ClusterTrust, peer: DialledPeer, limits: SessionLimits) -> None:
        self._wire = wire
        self._key = session_keys(trust)[0]
        self.peer = peer
        self._loop = asyncio.get_running_loop()
        self._num_connections = 0
        self._changed = asyncio.Event()
        self.session = MessageSession(secrets.randbits(63) | 1, LISTENER_KINDS[peer.role], limits, self._loop.time())
        self.pump = SessionPump(self.session, _apply_nothing, self._changed.set)
        self.other_version = False  # the listener speaks another protocol version

    async def run(self, owner: SessionOwner) -> None:
        """Connects until the session ends; `owner` gets its messages and its end."""
        self.pump.apply = owner.apply
        self.pump.start()
        try:
            await self._keep_connected()
        finally:
            self.session.lose("this process has ended the session")
            self.pump.close()
            owner.on_ended(self.session.end_reason)

    async def _keep_connected(self) -> None:
        pause_s, num_refused = 0.0, 0
        while self.session.state not in ENDED_STATES:
            await self._pause(pause_s)
            if self.session.state in ENDED_STATES:
                return
            began = self._loop.time()
            try:
                was_used = await self._use(await self._connect())
            except ConnectionRefused as error:
                num_refused += 1
                pause_s = REFUSED_PAUSE_S
                if num_refused == MAX_REFUSED_DIALS:
                    self.session.lose(str(error))
                continue
            num_refused, lasted = 0, was_used and self._loop.time() - began >= LAST_PAUSE_S
            pause_s = 0.0 if lasted else min(max(FIRST_PAUSE_S, 2 * pause_s), LAST_PAUSE_S)

    async def _connect(self) -> WireConnection:
        """Raises `ConnectionRefused` if nobody listens there."""
        try:
            async with self._while_it_lives(CONNECT_TIMEOUT_S):
                return await self._wire.connect(self.peer.address, self.peer.listener_incarnation)
        except (LinkBroken, TimeoutError) as error:
            raise ConnectionRefused(str(error) or f"{self.peer.address} does not answer") from None

    def _while_it_lives(self, seconds: float) -> asyncio.Timeout:
        """Bounds a step of a dial, which ends with the session at the latest: its attempts must hear of that."""
        now = self._loop.time()
        return asyncio.timeout_at(min(now + seconds, self.session.next_wakeup() or now))

    async def _use(self, connection: WireConnection) -> bool:
        """Runs a connection to its end. Returns False if the handshake failed. Raises `ConnectionRefused`."""
        try:
            async with self._while_it_lives(HANDSHAKE_TIMEOUT_S):
                await self._shake_hands(connection)
        except SessionRefused as error:
            self.other_version = error.other_version
            log.warning("session_refused", address=self.peer.address, why=str(error))
            self.session.lose(str(error))
            return False
        except ConnectionRefused:
            raise
        except (LinkBroken, TimeoutError) as error:
            why = str(error) or "it has not ended in time"
            log.warning("session_handshake_failed", address=self.peer.address, why=why)
            return False
        else:
            # In a task of its own: a frame would resume every coroutine up to `run` otherwise.
            await self._loop.create_task(self.pump.run(connection), name="session-connection")
            return True
        finally:
            connection.close()

    async def _shake_hands(self, connection: WireConnection) -> None:
        self._num_connections += 1
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            role=self.peer.role,
            id=self.peer.id,
            incarnation=self.peer.incarnation,
            listener_incarnation=self.peer.listener_incarnation,
            session_id=self.session.id,
            connection=self._num_connections,
            last_applied_seq=self.session.last_applied_seq,
            established=self.session.established,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        handshake = DiallerHandshake(self._key, hello)
        await connection.send(handshake.hello())
        answer = await connection.receive()
        if answer is None:
            raise HandshakeFailed("the connection ended within the handshake")
        dialled = handshake.on_challenge(answer)
        await connection.send(dialled.proof)
        if self.session.state in ENDED_STATES:
            raise HandshakeFailed("the session has ended within the handshake")
        self.session.connected(dialled.keys, dialled.peer_applied, self._loop.time())

    async def _pause(self, pause_s: float) -> None:
        """Waits before a dial, but not longer than the session lives."""
        self._changed.clear()
        if pause_s and self.session.state not in ENDED_STATES:
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                return


def _apply_nothing(messages: list[pb.StreamMessage]) -> None:
    """Nothing is received before `run`."""
