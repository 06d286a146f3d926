"""The transfer thread: takes commands, returns pull events. Owns a mover, its links and its pulls.

Decode calls `connect`, `submit`, `disconnect` and `close` from any thread. A `Mover` implements the transport and runs
only in this thread. The thread sleeps on its command queue until a command, the mover's next turn or a deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from baton.domain.errors import LinkBroken
from baton.domain.ids import WorkerId
from baton.transfer.active_pull import ActivePull
from baton.transfer.base import OnPullEvent, Pull, SourceInfo

OPEN_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 10.0
_ADDRESS_SPACE_BYTES = 1 << 64

_log = structlog.get_logger(__name__)


class Mover(Protocol):
    """Implementation of a transport. Runs in the transfer thread; no call blocks on the network."""

    def link(self, source: SourceInfo) -> None:
        """Makes a source readable; replaces its older incarnation. Raises `LinkBroken`."""
        ...

    def unlink(self, source: WorkerId) -> None:
        """Removes a source once its reads have ended. Ignores unknown sources."""
        ...

    def start(self, active: ActivePull) -> None:
        """Starts a pull. The mover then calls its `complete` or `fail`, once."""
        ...

    def progress(self) -> float | None:
        """Advances all pulls. Returns the seconds until the next call; None: after the next command."""
        ...

    def close(self) -> None:
        """Releases everything within seconds. Pulls in progress get no event."""
        ...


MoverFactory = Callable[[Callable[[], None]], Mover]
"""Makes the mover inside the transfer thread. Its argument wakes the thread and is thread-safe."""


@dataclass(frozen=True, slots=True)
class _Connect:
    source: SourceInfo
    reply: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Disconnect:
    source: WorkerId


@dataclass(frozen=True, slots=True)
class _Wake:
    pass


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = ActivePull | _Connect | _Disconnect | _Wake | _Close


class ThreadedPuller:
    """Decode's side of a transport: a transfer thread around one mover. A closed puller answers nothing."""

    def __init__(
        self, transport: str, part_ends: Sequence[int], make_mover: MoverFactory, on_event: OnPullEvent
    ) -> None:
        """`part_ends`: of local pages. Returns when the mover is made. Raises the error of `make_mover`."""
        self.transport = transport
        self._page_bytes = part_ends[-1]
        self._last_part_bytes = part_ends[-1] - part_ends[-2] if len(part_ends) > 1 else 0
        self._on_event = on_event
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._active_pulls: list[ActivePull] = []
        self._closed = threading.Event()
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_mover, opened), name=f"baton-pull-{transport}", daemon=True
        )
        self._thread.start()
        opened.result(OPEN_TIMEOUT_S)

    def connect(self, source: SourceInfo) -> None:
        """Links to a source; replaces its older incarnation. Blocks, bounded. Raises `LinkBroken`.

        Does not prove that the source can be reached; `baton.transfer.probe` does.
        """
        if source.transport != self.transport:
            raise LinkBroken(f"{source.worker_id} speaks {source.transport}, not {self.transport}")
        page_bytes = source.page_bytes + source.window_bytes
        if page_bytes != self._page_bytes:
            raise LinkBroken(f"{source.worker_id} has pages of {page_bytes} bytes, not {self._page_bytes}")
        if source.window_bytes not in (0, self._last_part_bytes):
            raise LinkBroken(
                f"{source.worker_id} has window parts of {source.window_bytes} bytes, which is no part here"
            )
        if not 0 < source.num_pages * source.page_bytes < _ADDRESS_SPACE_BYTES - source.base_address:
            raise LinkBroken(f"{source.worker_id} has {source.num_pages} pages at an address that cannot hold them")
        if source.num_window_slots * source.window_bytes >= _ADDRESS_SPACE_BYTES - source.window_base_address:
            raise LinkBroken(f"{source.worker_id} has window slots at an address that cannot hold them")
        if self._closed.is_set():
            raise LinkBroken("the puller is closed")
        command = _Connect(source)
        self._commands.put(command)
        try:
            command.reply.result(CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise LinkBroken(f"no link to {source.worker_id} within {CONNECT_TIMEOUT_S} s") from None

    def path(self, source: WorkerId) -> str:
        """Path of bytes from `source`, as far as known; for display."""
        return self.transport

    def submit(self, pull: Pull) -> None:
        """Starts a pull; its outcome comes as an event. An unknown source gives a `FAILED` event."""
        self.submit_to(pull, self._on_event)

    def submit_to(self, pull: Pull, on_event: OnPullEvent) -> None:
        """Like `submit`, with a callback for this pull alone (for the probe)."""
        self._commands.put(ActivePull(pull, time.monotonic(), on_event, time.monotonic))

    def disconnect(self, source: WorkerId) -> None:
        """Removes a source once its reads have ended. Idempotent; never blocks."""
        self._commands.put(_Disconnect(source))

    def close(self) -> None:
        """Ends the transfer thread within seconds; pulls in flight get no further events. Idempotent."""
        self._closed.set()
        self._commands.put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _log.error("transfer thread did not end", transport=self.transport, timeout_s=CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ in the transfer thread

    def _run(self, make_mover: MoverFactory, opened: Future[None]) -> None:
        try:
            mover = make_mover(lambda: self._commands.put(_Wake()))
        except Exception as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            self._serve(mover)
        except Exception:
            _log.exception("transfer thread failed; it takes no more pulls", transport=self.transport)
            self._reject_all()
        finally:
            mover.close()

    def _serve(self, mover: Mover) -> None:
        delay: float | None = None
        while True:
            for command in self._next_commands(delay):
                if isinstance(command, _Close):
                    return
                self._handle(command, mover)
            self._expire_late()
            delay = mover.progress()
            self._active_pulls = [active for active in self._active_pulls if not active.ended]
            delay = self._until_deadline(delay)

    def _next_commands(self, delay: float | None) -> Iterator[_Command]:
        """Waits at most `delay` seconds for a command, then yields all that have come."""
        try:
            yield self._commands.get(timeout=delay) if delay != 0.0 else self._commands.get_nowait()
            while True:
                yield self._commands.get_nowait()
        except queue.Empty:
            return

    def _handle(self, command: ActivePull | _Connect | _Disconnect | _Wake, mover: Mover) -> None:
        match command:
            case ActivePull():
                self._active_pulls.append(command)
                mover.start(command)
            case _Connect(source, reply):
                try:
                    mover.link(source)
                except LinkBroken as error:
                    reply.set_exception(error)
                else:
                    reply.set_result(None)
            case _Disconnect(source_id):
                mover.unlink(source_id)
            case _Wake():
                pass

    def _expire_late(self) -> None:
        now = time.monotonic()
        for active in self._active_pulls:
            if now > active.deadline:
                active.expire("past its deadline")

    def _until_deadline(self, delay: float | None) -> float | None:
        deadlines = [active.deadline for active in self._active_pulls if not active.late]
        if not deadlines:
            return delay
        remaining = max(0.0, min(deadlines) - time.monotonic())
        return remaining if delay is None else min(delay, remaining)

    def _reject_all(self) -> None:
        """After a crash of the mover: pulls in flight stay late, as bytes may still arrive; new pulls fail."""
        for active in self._active_pulls:
            active.expire("the transfer thread failed")
        while not isinstance(command := self._commands.get(), _Close):
            match command:
                case ActivePull():
                    command.fail("the transfer thread failed")
                case _Connect(_, reply):
                    reply.set_exception(LinkBroken("the transfer thread failed"))
                case _:
                    pass
