"""Moves the messages of one session over its connections: reads, applies, writes. Used by dialler and listener.

reader  receive -> session.receive -> apply (synchronous: a session never waits for a stream)
writer  wake -> session.take -> send, until there is nothing; waits only for the transport
timer   one for each session, whatever it is waiting for

Reader and writer are calls of the event loop where the connection is a `DirectConnection`, else tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from baton.domain.errors import Broken, LinkBroken
from baton.rpc.gen import session_pb2 as pb
from baton.session.lifecycle import ENDED_STATES
from baton.session.meter import SessionMeter
from baton.session.session import MessageSession
from baton.session.wires.wire import DirectConnection, WireConnection
from baton.telemetry.series.session_series import SESSION_CONNECTIONS

Apply = Callable[[list[pb.StreamMessage]], None]

log = structlog.get_logger(__name__)


class SessionPump:
    """Owned by one event loop. `apply` gets the messages of a frame, in order, and must not raise or wait.

    A frame that cannot be applied, or not be made, ends the session as lost: the other end counts it as applied, or
    waits for its number. `on_change` is called after each change of state that time or a frame has caused.
    """

    def __init__(self, session: MessageSession, apply: Apply, on_change: Callable[[], None]) -> None:
        self.session = session
        self.apply = apply  # its owner may set another one before the first connection
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._has_work = asyncio.Event()
        self._connection: WireConnection | None = None
        self._direct: DirectConnection | None = None  # the connection, if it is one
        self._has_room = True  # in the transport of `_direct`
        self._will_write = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # uvloop gives a timer that is due a handle without `when`
        self._soonest_s = session.soonest_wakeup_s
        self._meter = SessionMeter(session)

    def start(self) -> None:
        """Begins to watch the session's clock."""
        self._meter.open()
        self._arm()

    def post(self, message: pb.StreamMessage) -> None:
        """Sends a message; what is posted in one pass of the loop leaves in one frame."""
        self.session.post(message)
        self.wake()

    def post_rows(self, rows: list[pb.TokenRow]) -> None:
        """Sends a step's tokens, one row a stream."""
        for row in rows:
            self.session.post_row(row)
        self.wake()

    def post_tokens(self, stream: int, first_index: int, tokens: list[int]) -> None:
        """Sends the next tokens of a stream, consecutive ones from `first_index` on. Takes `tokens`."""
        self.session.post_tokens(stream, first_index, tokens)
        if not self._will_write:  # a call a token otherwise
            self.wake()

    def leave(self, reason: str) -> None:
        """Ends the session as planned; see `MessageSession.leave`."""
        state = self.session.state
        self.session.leave(reason, self._loop.time())
        if self.session.state is not state:
            self.wake()
            self._changed()

    def wake(self) -> None:
        """Writes in this pass of the loop, or in the next one."""
        if self._direct is None:
            self._has_work.set()
        elif not self._will_write:
            self._will_write = True
            self._loop.call_soon(self._write_now)

    async def run(self, connection: WireConnection) -> None:
        """Uses a connection until it ends. The session must have been connected with its keys. Closes it.

        Raises what `apply` raises; `Broken` in place of `LinkBroken`.
        """
        before, self._connection = self._connection, connection
        if before is not None:
            before.close()
        connections = SESSION_CONNECTIONS.labels(connection.wire)
        connections.inc()
        writers = self._start_writing(connection)
        self._arm()
        try:
            await self._read(connection)
        finally:
            for writer in writers:
                writer.cancel()
            connection.close()
            connections.dec()
            if self._connection is connection:  # else a newer one has replaced it
                self._connection = self._direct = None
                self.session.broken(self._loop.time())
                self._changed()
            self._meter.observe()
            if writers:
                await asyncio.gather(*writers, return_exceptions=True)  # gRPC may cancel this task, too, at any wait

    def close(self) -> None:
        """Stops the timer and ends the connection. The session is the owner's to end."""
        self._meter.end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection is not None:
            self._connection.close()

    async def _read(self, connection: WireConnection) -> None:
        try:
            if isinstance(connection, DirectConnection):
                await connection.hand_over(partial(self._take, connection))
                return
            while (message := await connection.receive()) is not None and self._take(connection, message):
                pass
        except LinkBroken:
            return  # bytes that are no message

    def _take(self, connection: WireConnection, message: pb.SessionMessage) -> bool:
        """Applies a frame. Returns False if nothing more is to be read from this connection."""
        if self._connection is not connection:
            return False
        session, now = self.session, self._loop.time()
        state = session.state
        try:
            messages = session.receive(message, now)
        except LinkBroken:
            return False  # the session has counted it
        if messages:
            try:
                self.apply(messages)
            except Exception as error:
                self._cannot_apply(error)
                raise
        if session.state is not state:
            self._changed()
        if session.has_work(now):
            self.wake()
        if self._timer is None or self._timer_at > now + self._soonest_s:
            self._arm()
        return self._connection is connection

    def _cannot_apply(self, error: Exception) -> None:
        """Loses the session after a bug: a part of the frame may be applied, and it does not come again.

        Raises `Broken` in place of `LinkBroken`, which would be taken for the connection's.
        """
        log.exception("session_frame_not_applied")
        self.session.lose(f"a frame could not be applied: {type(error).__name__}")
        self._changed()
        if isinstance(error, LinkBroken):
            raise Broken(str(error)) from error

    def _cannot_frame(self) -> None:
        """Tells of the end of the session, which a message that cannot be serialised has lost."""
        log.exception("session_frame_not_made")
        self._changed()

    def _start_writing(self, connection: WireConnection) -> list[asyncio.Task[None]]:
        """Writes what there is from now on. Returns the task that does so, if one does."""
        if isinstance(connection, DirectConnection):
            self._direct, self._has_room = connection, True
            connection.call_with_room(partial(self._on_room, connection))
            self.wake()
            return []
        self._direct = None
        self.wake()
        return [self._loop.create_task(self._write(connection), name="session-writer")]

    def _on_room(self, connection: DirectConnection) -> None:
        if self._direct is connection:
            self._has_room = True
            self.wake()

    def _write_now(self) -> None:
        """As `_write`, on a `DirectConnection`."""
        self._will_write = False
        connection = self._direct
        while connection is not None and self._has_room and self._direct is connection:
            try:
                message = self.session.take(self._loop.time())
            except Exception:
                self._cannot_frame()
                return
            if message is None:
                break
            try:
                self._has_room = connection.write(message)
            except LinkBroken:
                connection.close()
                return
        self._arm()

    async def _write(self, connection: WireConnection) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            state = self.session.state
            while self._connection is connection:  # a frame of a newer connection must not leave on this one
                try:
                    message = self.session.take(self._loop.time())
                except Exception:
                    self._cannot_frame()
                    return
                if message is None:
                    break
                try:
                    await connection.send(message)
                except LinkBroken:
                    connection.close()
                    return
            self._arm()
            if self.session.state is not state:
                self._changed()

    def _arm(self) -> None:
        """Sets the timer to the session's next wake-up, unless it is set to an earlier one, which then looks again."""
        wakeup = self.session.next_wakeup()
        if wakeup is None or (self._timer is not None and self._timer_at <= wakeup):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at, self._timer = wakeup, self._loop.call_at(wakeup, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._meter.observe()
        now, state = self._loop.time(), self.session.state
        self.session.on_time(now, now - self._timer_at)
        if self.session.state is not state:
            if self._connection is not None:
                self._connection.close()  # its reader ends, and says so
            self._changed()
        if self.session.has_work(now):
            self.wake()
        self._arm_later(now)

    def _arm_later(self, now: float) -> None:
        """Sets the timer after it went off. A wake-up that is due belongs to the writer, which waits for room."""
        wakeup = self.session.next_wakeup()
        if wakeup is not None and self._timer is None:
            self._timer_at = max(wakeup, now + 0.01)
            self._timer = self._loop.call_at(self._timer_at, self._on_timer)

    def _changed(self) -> None:
        if self.session.state in ENDED_STATES and self._connection is not None:
            self._connection.close()
        self._arm()
        self._on_change()
