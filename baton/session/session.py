"""One end of a session: frames in, messages out, and what must be sent. Sans-I/O, time is an argument.

A driver carries `SessionMessage`s over some `Wire`. After a handshake it calls `connected`, then `receive` for each
message that arrives and `take` until it returns None. It calls `on_time` at `next_wakeup`, and `broken` when the
connection has ended. What was posted is applied at the other end as a prefix, in order, once, over all connections.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from hmac import compare_digest
from operator import methodcaller

from google.protobuf.message import DecodeError

from baton.domain.errors import LinkBroken
from baton.rpc.gen import session_pb2 as pb
from baton.session.lifecycle import ENDED_STATES, SessionEvent, SessionState, advance_session
from baton.session.outbox import Outbox, OutboxLimits
from baton.session.tags import ConnectionKeys, FrameTagger

ROUTER_KINDS = frozenset({"open", "prompt", "abort", "reconcile", "goodbye", "reserve", "prefill", "abort_attempt"})
WORKER_KINDS = frozenset({"joined", "scores", "step", "ended", "goodbye", "reserve_reply", "prefill_event"})
IMPORTER_KINDS = frozenset({"link_request", "abort", "reconcile", "goodbye"})
EXPORTER_KINDS = frozenset({"link_reply", "ended", "goodbye"})
"""Kinds of messages that each role may send: a router to a worker, and a worker to one whose pages it reads."""

DIALLER_KINDS = {pb.SESSION_ROLE_ROUTER: ROUTER_KINDS, pb.SESSION_ROLE_WORKER: IMPORTER_KINDS}
LISTENER_KINDS = {pb.SESSION_ROLE_ROUTER: WORKER_KINDS, pb.SESSION_ROLE_WORKER: EXPORTER_KINDS}
"""By the role of the session's dialler."""

LOOK_AGAIN_S = 0.01
"""From silence to the second look: timers go off before sockets are read. A timer that is less late is on time."""

_kind_of = methodcaller("WhichOneof", "kind")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """`ping_s`: silence before a ping; `silent_s`: before a connection is broken; `resume_s`: from there to LOST.

    Applied frames are acknowledged within `ack_s` or `ack_bytes`. An ack alone costs a message, so acks are rare, but
    `ack_s` is below `ping_s`: a busy connection needs no pings. `dial_s`: from the start to the first connection.
    `leave_s`: for a goodbye to be heard. `probe_s`: between the pings that measure the round trip of a busy connection.
    """

    ping_s: float = 0.5
    silent_s: float = 1.5
    resume_s: float = 2.5
    dial_s: float = 6.0
    leave_s: float = 0.25
    probe_s: float = 5.0
    ack_s: float = 0.25
    ack_bytes: int = 256 << 10
    outbox: OutboxLimits = field(default_factory=OutboxLimits)


class BadFrame(LinkBroken):
    """A frame that the other end cannot have sent on this connection. Nothing of it is applied."""


@dataclass(slots=True)
class _Connection:
    """What lasts as long as a connection. Times are those of the clock of the session's owner."""

    sent: FrameTagger
    received: FrameTagger
    heard_at: float
    ping_sent: int = 0
    ping_sent_at: float = 0.0
    is_asked: bool = False  # a ping has left, and nothing was heard since
    is_excused: bool = False  # silence was found once, and nothing was heard since
    pong_owed: int = 0
    sent_ack: int = -1  # newest on this connection; a frame that would repeat it has none


class MessageSession:
    """One end. `accepts`: kinds of messages that the other end's role may send."""

    def __init__(self, session_id: int, accepts: Collection[str], limits: SessionLimits, now: float) -> None:
        self.id = session_id
        self.state = SessionState.DIALLING
        self.end_reason = ""
        self._leave_reason = ""
        self.last_applied_seq = 0
        self.established = False  # a frame was received: the other end has the session
        self.num_duplicates = 0
        self.num_bad_frames = 0
        self.num_breaks = 0
        self.num_round_trips = 0
        self.rtt_s = 0.0  # of the newest of them
        self.outbox = Outbox(limits.outbox)
        self._accepts = frozenset(accepts)
        self._limits = limits
        self._connection: _Connection | None = None
        self._gone_at = now + limits.dial_s  # without a connection until then it is LOST
        self._gone_is_excused = False  # `_gone_at` was moved once
        self._ack_due_at: float | None = None
        self._unacked_bytes = 0  # received since the last ack was sent
        self._leaves_by: float | None = None
        self._num_pings = 0

    def post(self, message: pb.StreamMessage) -> None:
        """Sends a message, sooner or later. No effect once the session has ended or leaves."""
        if self.state not in ENDED_STATES and self._leaves_by is None:
            self.outbox.post(message)

    def post_row(self, row: pb.TokenRow) -> None:
        """Sends a stream's next tokens; they may join those that wait. No effect once it has ended or leaves."""
        if self.state not in ENDED_STATES and self._leaves_by is None:
            self.outbox.post_row(row)

    def post_tokens(self, stream: int, first_index: int, tokens: list[int]) -> None:
        """As `post_row`, of a row with nothing but tokens. Takes `tokens`."""
        if self.state not in ENDED_STATES and self._leaves_by is None:
            self.outbox.post_tokens(stream, first_index, tokens)

    def connected(self, keys: ConnectionKeys, peer_applied: int, now: float) -> None:
        """A handshake has ended well, and the other end has applied `peer_applied` frames. The rest is sent again.

        Raises `BadFrame` if it has applied more than was framed: then it means another session.
        """
        if peer_applied > self.outbox.last_seq:
            raise BadFrame(f"the other end has applied frame {peer_applied} of {self.outbox.last_seq}")
        self.state = advance_session(self.state, SessionEvent.CONNECT)
        self._connection = _Connection(FrameTagger(keys.sent), FrameTagger(keys.received), now, ping_sent_at=now)
        self.outbox.acknowledge(peer_applied)
        self.outbox.rewind()
        self._ack_due_at = now  # the first frame tells the other end that it is established

    def broken(self, now: float) -> None:
        """The connection has ended. No effect without one. A goodbye has been heard, or never will be."""
        if self._connection is not None:
            self._connection = None
            self.state = advance_session(self.state, SessionEvent.BREAK)
            if self.state is SessionState.BROKEN:
                self.num_breaks += 1
                self._gone_at, self._gone_is_excused = now + self._limits.resume_s, False
            else:
                self.end_reason = self._leave_reason
                self.outbox.clear()

    def lose(self, reason: str) -> None:
        """Ends the session at this end: all its streams end. Idempotent."""
        if self.state not in ENDED_STATES:
            self.state = advance_session(self.state, SessionEvent.LOSE)
            self.end_reason = reason
            self._connection = None
            self.outbox.clear()

    def leave(self, reason: str, now: float) -> None:
        """Ends the session as planned: the other end hears a goodbye behind all that was posted but prompts.

        Closes when it has, or after `leave_s`, and at once without a connection. Idempotent.
        """
        if self.state is SessionState.OPEN:
            self.post(pb.StreamMessage(goodbye=pb.Goodbye(reason=reason)))
            self._leaves_by, self._leave_reason = now + self._limits.leave_s, reason
            self.state = advance_session(self.state, SessionEvent.LEAVE)
        elif self.state not in ENDED_STATES and self.state is not SessionState.LEAVING:
            self._close(reason)

    def _close(self, reason: str) -> None:
        """Ends the session as planned, at this end or at the other one."""
        self.state = advance_session(self.state, SessionEvent.CLOSE)
        self.end_reason = reason
        self._connection = None
        self.outbox.clear()

    def receive(self, message: pb.SessionMessage, now: float) -> list[pb.StreamMessage]:
        """Verifies a frame; returns its messages, which the caller applies at once.

        Raises `BadFrame`; the caller closes the connection then.
        """
        connection = self._connection
        if connection is None:
            return []
        body = message.body
        try:
            if not compare_digest(connection.received.tag(body), message.tag):
                raise BadFrame("a frame with a wrong tag")
            return self._apply(connection, pb.Frame.FromString(body), len(body), now)
        except (BadFrame, DecodeError) as error:
            self.num_bad_frames += 1
            self.broken(now)
            if isinstance(error, BadFrame):
                raise
            raise BadFrame("a frame that cannot be read") from None

    def take(self, now: float) -> pb.SessionMessage | None:
        """The next frame to write; None if there is nothing to send now. The transport has room for it.

        Raises what a message raises that cannot be serialised; the session is lost then.
        """
        connection = self._connection
        if connection is None:
            return None
        try:
            body = self.outbox.take()
        except Exception as error:  # a frame has its number already, and will not come: nothing can follow it
            self.lose(f"a frame could not be made: {type(error).__name__}")
            raise
        pong, connection.pong_owed = connection.pong_owed, 0
        ping = 0
        probes = body is not None and now - connection.ping_sent_at >= self._limits.probe_s
        if probes or self._ping_is_due(connection, now):
            self._num_pings = self._num_pings % 0x7FFFFFFF + 1
            ping, connection.is_asked = self._num_pings, True
            connection.ping_sent, connection.ping_sent_at = ping, now
        if body is None and not (pong or ping or self._ack_is_due(now)):
            return None
        self._ack_due_at, self._unacked_bytes = None, 0
        if body is None or ping or pong or self.last_applied_seq != connection.sent_ack:
            # Concatenated serialisations of one message type merge, so a retained frame gets a new ack without a parse.
            body = (body or b"") + pb.Frame(ack=self.last_applied_seq, ping=ping, pong=pong).SerializeToString()
            connection.sent_ack = self.last_applied_seq
        return pb.SessionMessage(body=body, tag=connection.sent.tag(body))

    def has_work(self, now: float) -> bool:
        """True if `take` would return a frame now."""
        connection = self._connection
        if connection is None:
            return False
        if connection.pong_owed or self.outbox.has_work or (self._ack_due_at is not None and self._ack_is_due(now)):
            return True
        return now != connection.heard_at and self._ping_is_due(connection, now)

    def _ping_is_due(self, connection: _Connection, now: float) -> bool:
        return not connection.is_asked and now - connection.heard_at >= self._limits.ping_s

    @property
    def soonest_wakeup_s(self) -> float:
        """Shortest time from a received message to a wake-up that it makes due."""
        return min(self._limits.ack_s, self._limits.ping_s, self._limits.silent_s)

    def next_wakeup(self) -> float | None:
        """When `on_time` and `take` have something to do without a message; None once the session has ended."""
        if self.state in ENDED_STATES:
            return None
        connection = self._connection
        if connection is None:
            return self._gone_at
        if connection.is_asked:
            wakeup = self._silent_at(connection)
        else:
            wakeup = connection.heard_at + min(self._limits.silent_s, self._limits.ping_s)
        if self._ack_due_at is not None and self._ack_due_at < wakeup:
            wakeup = self._ack_due_at
        if self._leaves_by is not None and self._leaves_by < wakeup:
            wakeup = self._leaves_by
        return wakeup

    def on_time(self, now: float, late_s: float = 0.0) -> None:
        """Breaks a silent connection, loses a session that was without one for too long, closes one that leaves.

        `late_s`: how much later than due the driver calls, because its process was stopped or had no core.
        """
        connection = self._connection
        if self._leaves_by is not None and now >= self._leaves_by and self.state is SessionState.LEAVING:
            self._close("its goodbye was not answered")
        elif connection is not None:
            if now >= self._silent_at(connection):
                self._on_silence(connection, now, late_s)
        elif self.state not in ENDED_STATES and now >= self._gone_at:
            self._on_gone(now, late_s)

    def _silent_at(self, connection: _Connection) -> float:
        """When silence is found. A ping that left late has as long for its answer as one in time."""
        silent_at = connection.heard_at + self._limits.silent_s
        if not connection.is_asked:
            return silent_at
        return max(silent_at, connection.ping_sent_at + self._limits.silent_s - self._limits.ping_s)

    def _on_silence(self, connection: _Connection, now: float, late_s: float) -> None:
        """Breaks the connection at the second look. At the first one, what came may not have been read.

        The other end gets as long again as the timer was late: it may have been stopped with this process.
        """
        if connection.is_excused:
            self.broken(now)
        else:
            connection.is_excused = True
            connection.heard_at = now - self._limits.silent_s + min(max(late_s, LOOK_AGAIN_S), self._limits.silent_s)

    def _on_gone(self, now: float, late_s: float) -> None:
        """Loses the session, unless the timer was late: a stopped process could not dial. Once for each break."""
        if late_s > LOOK_AGAIN_S and not self._gone_is_excused:
            self._gone_at, self._gone_is_excused = now + min(late_s, self._limits.resume_s), True
        else:
            self.lose(f"no connection since {self._waited_s():g} s")

    def _apply(self, connection: _Connection, frame: pb.Frame, num_bytes: int, now: float) -> list[pb.StreamMessage]:
        if frame.ack > self.outbox.last_seq:
            raise BadFrame(f"an ack of frame {frame.ack} of {self.outbox.last_seq}")
        seq, messages = frame.seq, list(frame.messages)
        if seq > self.last_applied_seq + 1 or (messages and not seq):
            raise BadFrame(f"frame {seq} came after frame {self.last_applied_seq}")
        kinds = set(map(_kind_of, messages))
        if not self._accepts.issuperset(kinds):
            raise BadFrame("a message that the other end's role may not send")
        self.established = True
        connection.heard_at = now
        connection.is_asked = connection.is_excused = False  # any frame shows that the other end is there
        if frame.ping or frame.pong:
            self._hear_ping(connection, frame, now)
        if frame.ack:
            self.outbox.acknowledge(frame.ack)
        if seq:
            self._unacked_bytes += num_bytes
            if self._ack_due_at is None:
                self._ack_due_at = now + self._limits.ack_s
        if seq == self.last_applied_seq + 1:
            self.last_applied_seq = seq
            if "goodbye" in kinds:
                self._hear_goodbye(messages)
            return messages
        self.num_duplicates += bool(seq)
        return []

    def _hear_goodbye(self, messages: list[pb.StreamMessage]) -> None:
        """Closes the session when the other end has left it. Its driver closes the connection, which is the answer."""
        for message in messages:
            if message.HasField("goodbye") and self.state not in ENDED_STATES:
                self._close(message.goodbye.reason)

    def _hear_ping(self, connection: _Connection, frame: pb.Frame, now: float) -> None:
        connection.pong_owed = frame.ping or connection.pong_owed
        if frame.pong and frame.pong == connection.ping_sent:
            self.num_round_trips += 1
            self.rtt_s = now - connection.ping_sent_at

    def _ack_is_due(self, now: float) -> bool:
        due_at = self._ack_due_at
        return due_at is not None and (now >= due_at or self._unacked_bytes >= self._limits.ack_bytes)

    def _waited_s(self) -> float:
        return self._limits.resume_s if self.num_breaks else self._limits.dial_s
