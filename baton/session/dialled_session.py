"""What both users of a dialled session do with its streams: a router's session with a worker, and an importer's."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

from baton.domain.errors import WorkerLost
from baton.rpc.gen import session_pb2 as pb
from baton.session.dialler import SessionDialler
from baton.session.lifecycle import ENDED_STATES, SessionState
from baton.session.streams import StreamTable
from baton.telemetry.series.session_series import SESSION_EVENTS_TOTAL

RECONCILE_S = 10.0


class _EndingStream(Protocol):
    def end(self, lost: WorkerLost | None, /) -> None: ...


StreamT = TypeVar("StreamT", bound=_EndingStream)


class DialledSession(Generic[StreamT]):
    """A `SessionOwner` but for `apply`. Runs its dialler from its construction on, in `task`."""

    def __init__(self, dialler: SessionDialler, name: str) -> None:
        """`name`: of the task."""
        self._dialler = dialler
        self._streams: StreamTable[StreamT] = StreamTable()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(RECONCILE_S, self._reconcile)
        self.task = self._loop.create_task(dialler.run(self), name=name)
        # A task that is cancelled before its first step runs no `finally` of its own.
        self.task.add_done_callback(lambda _: self.on_ended("this process has ended the session"))

    @property
    def has_ended(self) -> bool:
        """True once the session was lost or closed."""
        return self._dialler.session.state in ENDED_STATES

    @property
    def is_usable(self) -> bool:
        """True until the session has ended or leaves."""
        return not self.has_ended and self._dialler.session.state is not SessionState.LEAVING

    @property
    def other_version(self) -> bool:
        """True if the listener has refused the session because it speaks another protocol version."""
        return self._dialler.other_version

    def leave(self, reason: str) -> None:
        """Ends the session as planned. `task` ends when the listener has heard of it, or after `leave_s`."""
        self._dialler.pump.leave(reason)
        if self.has_ended:  # it may be within a dial
            self.task.cancel()

    def apply(self, messages: list[pb.StreamMessage]) -> None:
        """See `SessionOwner`."""
        raise NotImplementedError

    def on_ended(self, reason: str) -> None:
        """See `SessionOwner`. All that was asked in it has lost its worker."""
        self._timer.cancel()
        for stream in self._streams.close_all():
            stream.end(WorkerLost(f"the session with a worker has ended: {reason}"))

    def _find(self, number: int) -> StreamT | None:
        stream = self._streams.handlers.get(number)
        if stream is None:
            SESSION_EVENTS_TOTAL.labels("late_message").inc()
        return stream

    def _abort(self, number: int) -> None:
        if self._streams.close(number) is not None:
            self._dialler.pump.post(pb.StreamMessage(stream=number, abort=pb.Abort(reason="not wanted any more")))

    def _reconcile(self) -> None:
        """Tells the listener what is open here. Both ends agree, unless one of them has a bug."""
        self._timer = self._loop.call_later(RECONCILE_S, self._reconcile)
        self._dialler.pump.post(pb.StreamMessage(reconcile=pb.Reconcile(streams=self._streams.numbers)))
