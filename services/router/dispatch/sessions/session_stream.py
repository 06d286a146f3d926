"""One stream in a session, as its attempt reads it: an attempt of decode, a reservation or a prompt.

A worker that answers with messages of another stream's kind is damaged or lies: its attempt fails, and is tried again.
Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.domain.errors import WorkerLost
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource, damaged
from baton.services.router.generation import TokenChunk

SessionEvent = decode_pb2.GenerateEvent | pb.Joined | pb.TokenRow | decode_pb2.ReserveReply | prefill_pb2.PrefillEvent

OnRow = Callable[[pb.TokenRow], TokenChunk | None]
"""Takes a row at once. A chunk that it returns, and an exception that it raises, go to the reader."""


@dataclass(frozen=True, slots=True)
class StreamKind:
    """What is asked in a stream. `events`: types of its answers. `source`: whose fault any other answer is.

    `make_failure`: the event of a stream that fails.
    """

    name: str
    events: frozenset[type[SessionEvent]]
    source: FaultSource
    make_failure: Callable[[common_pb2.Failure], SessionEvent]


ATTEMPT = StreamKind(
    "an attempt",
    frozenset({decode_pb2.GenerateEvent, pb.Joined, pb.TokenRow}),
    FaultSource.DECODE,
    lambda failure: decode_pb2.GenerateEvent(failed=failure),
)
RESERVATION = StreamKind(
    "a reservation",
    frozenset({decode_pb2.ReserveReply}),
    FaultSource.DECODE,
    lambda failure: decode_pb2.ReserveReply(refused=failure),
)
PROMPT = StreamKind(
    "a prompt",
    frozenset({prefill_pb2.PrefillEvent}),
    FaultSource.PREFILL,
    lambda failure: prefill_pb2.PrefillEvent(failed=failure),
)


class SessionStream:
    """Keeps what came until it is read: the session itself never waits. A request bounds its own tokens.

    A reader that waits may have rows handed to it by a call, without a task switch: all but the last one of the stream.
    A reader without a task has a call instead (`listen`).
    `on_cancel` tells the worker that the rest is not wanted.
    """

    def __init__(self, on_cancel: Callable[[], None], kind: StreamKind = ATTEMPT) -> None:
        self._on_cancel = on_cancel
        self._kind = kind
        self._unread: deque[SessionEvent | AttemptFailure] = deque()
        self._lost: WorkerLost | None = None
        self._ended = False
        self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_row: OnRow | None = None  # set while the reader waits and nothing is unread
        self._refused: TokenChunk | Exception | None = None  # by `_on_row`; the reader gets it before all else
        self._on_ready: Callable[[], None] | None = None

    def put(self, event: SessionEvent) -> None:
        """Adds an event. The reader gets one that the stream must not bring as an `AttemptFailure`."""
        if self._cancelled:
            return
        if type(event) in self._kind.events:
            self._unread.append(event)
        else:
            why = f"{type(event).__name__} in the stream of {self._kind.name}"
            self._unread.append(damaged(why, self._kind.source))
        self._wake()

    def put_last(self, event: SessionEvent) -> None:
        """Adds the event that ends the stream: nothing comes behind it."""
        self._ended = True
        self.put(event)

    def brings(self, event: SessionEvent) -> bool:
        """True for an event of this kind of stream."""
        return type(event) in self._kind.events

    def put_failure(self, failure: common_pb2.Failure) -> None:
        """Adds the event of a failure."""
        self.put(self._kind.make_failure(failure))

    def put_row(self, row: pb.TokenRow) -> None:
        """Adds a row, or hands it to the reader that waits for it. Raises nothing."""
        on_row, waiter = self._on_row, self._waiter
        if on_row is None or row.finish_reason or waiter is None or waiter.done():
            self.put(row)
            return
        try:
            refused: TokenChunk | Exception | None = on_row(row)
        except Exception as error:  # it is the reader's: the session must not fail
            refused = error
        if refused is not None:
            self._refused = refused
            self._wake()

    def end(self, lost: WorkerLost | None = None) -> None:
        """Nothing more comes; after what is unread, `read` raises `lost`."""
        self._ended, self._lost = True, lost
        self._wake()

    def cancel(self) -> None:
        """Ends the stream here and at the worker. Idempotent. A read raises `CancelledError` from now on."""
        if not self._cancelled:
            self._cancelled = True
            self._on_ready = None
            self._unread.clear()
            if not self._ended:
                self._on_cancel()
            self._wake()

    @property
    def is_ready(self) -> bool:
        """True if a read does not wait."""
        return bool(self._unread) or self._ended or self._cancelled or self._refused is not None

    def listen(self, call: Callable[[], None] | None) -> None:
        """Calls `call` whenever the stream becomes ready, until the stream is cancelled. It must not raise.

        None ends that. The session calls it while it applies a frame.
        """
        self._on_ready = call

    async def read(self, on_row: OnRow | None = None) -> SessionEvent | TokenChunk | None:
        """The next event that `on_row` has not taken; None at the end. Raises `WorkerLost` when the session was lost,
        and `AttemptFailure` for what the stream must not bring.

        While it waits, each row but the stream's last goes to `on_row` instead.
        """
        while not (self._unread or self._ended or self._cancelled or self._refused is not None):  # `is_ready`
            self._waiter, self._on_row = asyncio.get_running_loop().create_future(), on_row
            try:
                await self._waiter
            finally:
                self._waiter = self._on_row = None
        return self.read_now()

    def read_now(self) -> SessionEvent | TokenChunk | None:
        """As `read`, of a stream that `is_ready`."""
        if self._refused is not None:  # also what an earlier read was cancelled before it had
            refused, self._refused = self._refused, None
            if isinstance(refused, Exception):
                raise refused
            return refused  # its tokens are recorded: they must reach the client
        if self._unread:
            event = self._unread.popleft()
            if isinstance(event, AttemptFailure):
                raise event
            return event
        if self._cancelled:
            raise asyncio.CancelledError
        if self._lost is not None:
            raise self._lost
        return None

    def _wake(self) -> None:
        """Wakes the reader. What follows waits until it has read."""
        self._on_row = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self._on_ready is not None:
            self._on_ready()
