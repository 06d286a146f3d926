"""Delivers the prefill engine's events: to the handoff log for decode workers, and to the routers' streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from baton.domain.errors import Cancelled, LeaseEnded, Superseded
from baton.domain.handoff import PublishedChunk
from baton.engine.handoff.export_events import ExportEnded, ExportExpired, Seal
from baton.engine.handoff.import_effects import AbortHandoff, AskExport, AskVerdict, ConfirmCommit
from baton.engine.messages import Fail
from baton.services.prefill.commands import PrefillEvent
from baton.services.prefill.server import PrefillStreamEvent
from baton.transfer.base import Pull
from baton.worker.handoff.export_client import ExportClient
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.streams import AttemptStreams


class PrefillOutbox:
    """Takes the events of a turn into the asyncio loop with one call."""

    def __init__(
        self,
        handoffs: HandoffLog,
        streams: AttemptStreams[PrefillStreamEvent],
        recent: RecentAttempts,
        submit: Callable[[Pull], None] = lambda pull: None,
        peers: ExportClient | None = None,
    ) -> None:
        """`submit` starts a read, from any thread. `peers`: the workers whose cached pages are read."""
        self._loop = asyncio.get_running_loop()
        self._handoffs = handoffs
        self._streams = streams
        self._recent = recent
        self._submit = submit
        self._peers = peers

    def emit(self, events: list[PrefillEvent]) -> None:
        """Schedules the delivery of events. Called from the engine thread; never blocks."""
        rest: list[PrefillEvent] = []
        for event in events:
            if isinstance(event, Pull):
                self._submit(event)
            else:
                rest.append(event)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self.deliver, rest)

    def deliver(self, events: list[PrefillEvent]) -> None:
        """Delivers events. Called in the asyncio loop."""
        for event in events:
            match event:
                case PublishedChunk(id):
                    self._handoffs.append(id, event)
                case Seal(id):
                    self._recent.add(id, event.times)
                    self._handoffs.append(id, event)
                    self._streams.deliver(id, event)
                case Fail(id, Superseded(seen=seen)) if seen == id:
                    self._streams.deliver(id, event)  # a repeated call; the attempt itself goes on
                case Fail(id, error):
                    self._recent.add(id, end_code=error.code)
                    self._handoffs.append(id, error)
                    self._handoffs.end(id)
                    self._streams.deliver(id, event)
                case ExportEnded(id, reason):
                    self._handoffs.end(id, Cancelled(f"{id}: {reason}"))
                    self._streams.deliver(id, Fail(id, Cancelled(reason)))
                case ExportExpired(id):
                    self._handoffs.end(id, LeaseEnded(f"{id}: its lease ended before the commit"))
                case AskExport() | ConfirmCommit() | AbortHandoff() | AskVerdict():
                    if self._peers is not None:
                        self._peers.perform(event)
                case Pull():
                    self._submit(event)
                case _:
                    self._streams.deliver(event.id, event)
