"""Both ends of a session over a pipe that cuts, flips, drops, swaps, repeats and reflects, and the invariants of both.

The world plays the drivers: it carries `SessionMessage`s as bytes, and closes a connection at an end that refuses one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.version import PROTOCOL_VERSION
from baton.session.acceptor import AcceptedSession, Acceptor
from baton.session.handshake import DiallerHandshake, OfferedConnection, SessionRefused
from baton.session.lifecycle import ENDED_STATES, SessionState
from baton.session.outbox import OutboxLimits
from baton.session.session import WORKER_KINDS, MessageSession, SessionLimits
from baton.session.tags import OPEN_SESSION_KEY

LIMITS = SessionLimits(outbox=OutboxLimits(window_bytes=300, frame_bytes=120))
MAX_MESSAGE_BYTES = 120
INCARNATION = Incarnation(77)
NUM_STREAMS = 3


@dataclass
class Connection:
    """One connection: bytes on their way to each end. An end that is closed reads and writes nothing."""

    number: int
    handshake: DiallerHandshake
    to_listener: deque[bytes] = field(default_factory=deque)
    to_dialler: deque[bytes] = field(default_factory=deque)
    offered: OfferedConnection | None = None
    dialler_open: bool = True
    listener_open: bool = True
    dialler_proven: bool = False
    accepted: AcceptedSession | None = None


@dataclass
class Journal:
    """What was posted at one end, and what the other has applied: messages, and tokens by stream."""

    posted: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    applied_tokens: dict[int, list[int]] = field(default_factory=dict)

    def check(self) -> None:
        """N1: a prefix, in order, once."""
        assert self.applied == self.posted[: len(self.applied)]
        for stream, tokens in self.applied_tokens.items():
            assert tokens == self.tokens[stream][: len(tokens)]

    @property
    def is_complete(self) -> bool:
        return self.applied == self.posted and all(
            self.applied_tokens.get(stream, []) == tokens for stream, tokens in self.tokens.items()
        )


class SessionWorld:
    """A router that dials and a worker that listens."""

    def __init__(self) -> None:
        self.now = 100.0
        self.acceptor = Acceptor((OPEN_SESSION_KEY,), INCARNATION, LIMITS)
        self.dialler = MessageSession(5, WORKER_KINDS, LIMITS, self.now)
        self.listener: MessageSession | None = None
        self.connections: list[Connection] = []
        self.down, self.up = Journal(), Journal()
        self._num_tokens = 0

    @property
    def worker(self) -> MessageSession:
        """The listener's end of a session that was accepted."""
        assert self.listener is not None
        return self.listener

    # What the owners of both ends do.

    def post_down(self, number: int) -> None:
        """The router aborts some stream."""
        message = pb.StreamMessage(stream=1 + number % NUM_STREAMS, abort=pb.Abort(reason=str(len(self.down.posted))))
        if self.dialler.state not in ENDED_STATES:
            self.dialler.post(message)
            self.down.posted.append(message.abort.reason)

    def post_up(self, number: int) -> None:
        """The worker joins some stream."""
        if self.listener is not None and self.listener.state not in ENDED_STATES:
            message = pb.StreamMessage(stream=1 + number % NUM_STREAMS)
            message.joined.first_token.index = len(self.up.posted)
            message.joined.first_token.token = len(self.up.tokens.get(message.stream, []))
            self.listener.post(message)
            self.up.posted.append(str(message.joined.first_token.index))

    def post_row(self, number: int) -> None:
        """The worker has the next tokens of some stream."""
        if self.listener is not None and self.listener.state not in ENDED_STATES:
            stream = 1 + number % NUM_STREAMS
            tokens = self.up.tokens.setdefault(stream, [])
            new = [self._next_token() for _ in range(1 + number // NUM_STREAMS % 2)]
            self.listener.post_row(pb.TokenRow(stream=stream, first_index=len(tokens), tokens=new))
            tokens.extend(new)

    def _next_token(self) -> int:
        self._num_tokens += 1
        return self._num_tokens

    # What drivers and the network do.

    def dial(self, _: int = 0) -> None:
        """The router has given up its connection, and opens another one."""
        if self.dialler.state in ENDED_STATES:
            return
        self._close_dialler_ends()
        number = len(self.connections) + 1
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION, role=pb.SESSION_ROLE_ROUTER, id="r", incarnation=9,
            listener_incarnation=INCARNATION, session_id=self.dialler.id, connection=number,
            last_applied_seq=self.dialler.last_applied_seq, established=self.dialler.established,
            nonce=number.to_bytes(16, "little"),
        )  # fmt: skip
        connection = Connection(number, DiallerHandshake(OPEN_SESSION_KEY, hello))
        connection.to_listener.append(connection.handshake.hello().SerializeToString())
        self.connections.append(connection)

    def cut(self, number: int) -> None:
        """The newest connection ends: at the router, at the worker, or at both."""
        if self.connections:
            connection = self.connections[-1]
            if number % 3 != 0:
                self._close_listener_end(connection)
            if number % 3 != 1:
                self._close_dialler_ends()

    def deliver_down(self, number: int) -> None:
        """The worker reads up to four messages of some connection, mostly the newest."""
        for connection in self._choose(number):
            for _ in range(1 + number % 4):
                if connection.to_listener and connection.listener_open:
                    self._read_at_listener(connection, connection.to_listener.popleft())

    def deliver_up(self, number: int) -> None:
        """The router reads up to four messages of some connection, mostly the newest."""
        for connection in self._choose(number):
            for _ in range(1 + number % 4):
                if connection.to_dialler and connection.dialler_open:
                    self._read_at_dialler(connection, connection.to_dialler.popleft())

    def wait(self, number: int) -> None:
        """Time passes, up to 0.8 s, or rarely seconds."""
        self.now += number / 320 if number < 250 else 3.0
        for session in self._sessions():
            session.on_time(self.now)
        self.acceptor.remove_ended()

    def stand_still(self, number: int) -> None:
        """Both processes are stopped, up to 5 s."""
        self.now += number / 50
        for session in self._sessions():
            session.on_time(self.now, number / 50)
        self.acceptor.remove_ended()

    def damage(self, number: int) -> None:
        """Flips, drops, repeats, swaps, truncates or reflects what is on its way."""
        if not self.connections:
            return
        connection = self.connections[-1]
        queue, other = connection.to_listener, connection.to_dialler
        if number % 2:
            queue, other = other, queue
        if not queue:
            return
        kind, place = number // 2 % 6, number // 12
        if kind == 0:
            data = bytearray(queue[-1])
            data[place * 7 % len(data)] ^= 1 << place % 8
            queue[-1] = bytes(data)
        elif kind == 1:
            queue.popleft()
        elif kind == 2:
            queue.append(queue[-1])
        elif kind == 3 and len(queue) > 1:
            queue.rotate(1)
        elif kind == 4:
            queue[-1] = queue[-1][: place * 5 % (len(queue[-1]) + 1)]
        else:
            other.append(queue[-1])

    def settle(self) -> None:
        """The network is whole again: dials until all that was posted is applied, or the dialler knows of a loss."""
        for _ in range(12):
            is_complete = self.down.is_complete and self.up.is_complete and self._acknowledged()
            if is_complete or self.dialler.state in ENDED_STATES:
                return
            if self.dialler.state is not SessionState.OPEN or not self._listener_reads():
                self.dial()
            for _ in range(40):
                self.deliver_down(3)
                self.deliver_up(3)
                self.flush()
                self.now += 0.01
        raise AssertionError("a whole network does not bring over what was posted")

    def flush(self, _: int = 0) -> None:
        """Both ends write what they have."""
        if not self.connections:
            return
        connection = self.connections[-1]
        if connection.dialler_proven and connection.dialler_open:
            while (message := self.dialler.take(self.now)) is not None:
                connection.to_listener.append(message.SerializeToString())
        if connection.accepted is not None and connection.listener_open:
            while (message := connection.accepted.session.take(self.now)) is not None:
                connection.to_dialler.append(message.SerializeToString())

    def check(self) -> None:
        """N1, N2, N3 and N6: a wrong message would break a prefix."""
        self.down.check()
        self.up.check()
        assert len(self.acceptor.sessions) <= 1
        for session in self._sessions():
            assert session.outbox.retained_bytes <= LIMITS.outbox.window_bytes + LIMITS.outbox.frame_bytes + 120
            assert session.outbox.waiting_bytes >= 0
        reading = [c.number for c in self.connections if c.accepted is not None and c.listener_open]
        for accepted in self.acceptor.sessions:
            assert all(number == accepted.connection for number in reading)

    def _choose(self, number: int) -> list[Connection]:
        if not self.connections:
            return []
        return [self.connections[-1] if number < 200 else self.connections[number % len(self.connections)]]

    def _sessions(self) -> list[MessageSession]:
        return [self.dialler] if self.listener is None else [self.dialler, self.listener]

    def _acknowledged(self) -> bool:
        return all(session.outbox.is_empty for session in self._sessions())

    def _listener_reads(self) -> bool:
        connection = self.connections[-1] if self.connections else None
        return connection is not None and connection.accepted is not None and connection.listener_open

    def _close_dialler_ends(self) -> None:
        for connection in self.connections:
            connection.dialler_open = False
        self.dialler.broken(self.now)

    def _close_listener_end(self, connection: Connection) -> None:
        connection.listener_open = False
        accepted = connection.accepted
        if accepted is not None and accepted.connection == connection.number:
            accepted.session.broken(self.now)

    def _read_at_listener(self, connection: Connection, data: bytes) -> None:
        try:
            message = pb.SessionMessage.FromString(data)
            if connection.accepted is not None:
                for applied in connection.accepted.session.receive(message, self.now):
                    self.down.applied.append(applied.abort.reason)
            elif connection.offered is None:
                answer = self.acceptor.on_hello(message, (1000 + connection.number).to_bytes(16, "little"))
                if isinstance(answer, OfferedConnection):
                    connection.offered, answer = answer, answer.message
                connection.to_dialler.append(answer.SerializeToString())
            else:
                self._accept(connection, self.acceptor.on_proof(connection.offered, message, self.now))
        except (LinkBroken, DecodeError):
            self._close_listener_end(connection)

    def _accept(self, connection: Connection, accepted: AcceptedSession) -> None:
        for older in self.connections:
            if older is not connection and older.accepted is accepted:
                older.listener_open = False
        assert self.listener in (None, accepted.session), "one session of one dialler became two"
        connection.accepted, self.listener = accepted, accepted.session

    def _read_at_dialler(self, connection: Connection, data: bytes) -> None:
        try:
            message = pb.SessionMessage.FromString(data)
            if not connection.dialler_proven:
                dialled = connection.handshake.on_challenge(message)
                self.dialler.connected(dialled.keys, dialled.peer_applied, self.now)
                connection.dialler_proven = True
                connection.to_listener.append(dialled.proof.SerializeToString())
                return
            for applied in self.dialler.receive(message, self.now):
                self._apply_up(applied)
        except (LinkBroken, DecodeError) as error:
            self._close_dialler_ends()
            if isinstance(error, SessionRefused):
                self.dialler.lose(str(error))

    def _apply_up(self, message: pb.StreamMessage) -> None:
        if message.HasField("joined"):
            first = message.joined.first_token
            self.up.applied.append(str(first.index))
            num_tokens = len(self.up.applied_tokens.get(message.stream, []))
            assert num_tokens == first.token, "a stream's message has overtaken its tokens, or they it"
        for row in message.step.rows:
            tokens = self.up.applied_tokens.setdefault(row.stream, [])
            assert row.first_index == len(tokens), "a gap, or tokens twice"
            tokens.extend(row.tokens)
