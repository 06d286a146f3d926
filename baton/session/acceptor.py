"""A listener's sessions by dialler: which connection feeds which session. Pure: nonces and time are arguments.

    Hello -> offer -> Proof -> accept -> the session with its newest connection

A dialler has one session; a new incarnation of it, or another session id, ends the one before. A session that was lost
here is remembered for a while, so that a dialler that has not noticed cannot start its streams again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from baton.domain.errors import BatonError, LinkBroken
from baton.domain.ids import Incarnation
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.version import PROTOCOL_VERSION
from baton.session.handshake import (
    HandshakeFailed,
    OfferedConnection,
    check_hello,
    offer,
    read_hello,
    refuse,
)
from baton.session.lifecycle import ENDED_STATES, SessionState
from baton.session.session import DIALLER_KINDS, MessageSession, SessionLimits

MAX_LOST_SESSIONS = 1024

ALL_ROLES = frozenset(DIALLER_KINDS)


@dataclass(slots=True)
class AcceptedSession:
    """A session at its listener. `connection`: number of the newest one that was proven; older ones are not read."""

    session: MessageSession
    role: pb.SessionRole
    dialler: str
    incarnation: Incarnation
    connection: int


class Acceptor:
    """Owned by the listener of one process. `on_replaced` gets a session that another one of its dialler has ended.

    `roles`: of the diallers that are served. A dialler is known by its role and id.
    """

    def __init__(
        self,
        keys: tuple[bytes, ...],
        incarnation: Incarnation,
        limits: SessionLimits,
        on_replaced: Callable[[AcceptedSession], None] = lambda accepted: None,
        roles: Collection[pb.SessionRole] = ALL_ROLES,
    ) -> None:
        self._keys = keys
        self._incarnation = incarnation
        self._limits = limits
        self._on_replaced = on_replaced
        self._roles = frozenset(roles)
        self._by_dialler: dict[tuple[pb.SessionRole, str], AcceptedSession] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    @property
    def sessions(self) -> tuple[AcceptedSession, ...]:
        """All sessions that have not ended."""
        return tuple(self._by_dialler.values())

    def on_hello(self, message: pb.SessionMessage, nonce: bytes) -> OfferedConnection | pb.SessionMessage:
        """The offer to a dialler, or a message that refuses it. Changes no state. Raises `HandshakeFailed`."""
        received = read_hello(self._keys, message)
        try:
            check_hello(received.hello, self._incarnation)
            found = self._find(received.hello)
        except BatonError as error:
            return refuse(received, self._incarnation, error)
        challenge = pb.Challenge(
            protocol_version=PROTOCOL_VERSION,
            incarnation=self._incarnation,
            last_applied_seq=0 if found is None else found.session.last_applied_seq,
            nonce=nonce,
        )
        return offer(received, challenge)

    def on_proof(self, offered: OfferedConnection, proof: pb.SessionMessage, now: float) -> AcceptedSession:
        """Connects the session, or creates it. Raises `LinkBroken` if the proof is wrong or the session has ended.

        An older connection of the session must not be read any more.
        """
        keys, hello = offered.keys(proof), offered.received.hello
        found = self._find(hello)
        if found is not None and hello.connection <= found.connection:
            raise HandshakeFailed(f"connection {hello.connection} is not newer than {found.connection}")
        if found is None:
            session = MessageSession(hello.session_id, DIALLER_KINDS[hello.role], self._limits, now)
            found = AcceptedSession(session, hello.role, hello.id, Incarnation(hello.incarnation), hello.connection)
        found.session.connected(keys, hello.last_applied_seq, now)
        found.connection = hello.connection
        before = self._by_dialler.get((hello.role, hello.id))
        self._by_dialler[hello.role, hello.id] = found
        if before is not None and before is not found:
            before.session.lose("its dialler has begun another session")
            self._remember(before)
            self._on_replaced(before)
        return found

    def remove_ended(self) -> list[AcceptedSession]:
        """Removes and returns the sessions that were lost or closed."""
        ended = [accepted for accepted in self._by_dialler.values() if accepted.session.state in ENDED_STATES]
        for accepted in ended:
            del self._by_dialler[accepted.role, accepted.dialler]
            self._remember(accepted)
        return ended

    def _find(self, hello: pb.Hello) -> AcceptedSession | None:
        """The session that a `Hello` continues; None for a new one. Raises `LinkBroken` for one that ends here."""
        if hello.role not in self._roles:
            raise LinkBroken("a dialler without a role that is served here")
        found = self._by_dialler.get((hello.role, hello.id))
        if found is not None and found.session.id == hello.session_id and found.incarnation == hello.incarnation:
            if found.session.state in ENDED_STATES or found.session.state is SessionState.LEAVING:
                raise LinkBroken("the session has ended here")
            return found
        if hello.established or hello.session_id in self._ended:
            raise LinkBroken("the session is not known here any more")
        return None

    def _remember(self, accepted: AcceptedSession) -> None:
        self._ended[accepted.session.id] = None
        if len(self._ended) > MAX_LOST_SESSIONS:
            self._ended.popitem(last=False)
