"""Delivers the prefill engine's events: to the handoff log for decode workers, and to the routers' streams."""

from __future__ import annotations

import asyncio
import contextlib

from baton.domain.errors import Cancelled
from baton.domain.handoff import PublishedChunk
from baton.engine.handoff.export_events import ExportEnded, ExportExpired, Seal
from baton.engine.messages import Fail
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.streams import AttemptStreams
from services.prefill.commands import PrefillEvent
from services.prefill.server import PrefillStreamEvent


class PrefillOutbox:
    """Takes the events of a turn into the asyncio loop with one call."""

    def __init__(
        self, handoffs: HandoffLog, streams: AttemptStreams[PrefillStreamEvent], recent: RecentAttempts
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handoffs = handoffs
        self._streams = streams
        self._recent = recent

    def emit(self, events: list[PrefillEvent]) -> None:
        """Schedules the delivery of events. Called from the engine thread; never blocks."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self.deliver, events)

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
                case Fail(id, error):
                    self._recent.add(id, end_code=error.code)
                    self._handoffs.append(id, error)
                    self._handoffs.end(id)
                    self._streams.deliver(id, event)
                case ExportEnded(id, reason):
                    self._handoffs.end(id)
                    self._streams.deliver(id, Fail(id, Cancelled(reason)))
                case ExportExpired(id):
                    self._handoffs.end(id)
                case _:
                    self._streams.deliver(event.id, event)
