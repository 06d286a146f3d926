"""The outbox: carries the prefill engine's events to the rooms that want them. Called from the engine thread.

What decode follows goes to the handoff log, what the router waits for to its stream.
"""

from __future__ import annotations

import asyncio
import contextlib

from baton.domain.errors import Cancelled
from baton.domain.handoff import PublishedChunk
from baton.engine.messages import Fail
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.streams import AttemptStreams
from services.prefill.commands import ExportEnded, PrefillEvent
from services.prefill.handoff_log import HandoffLog
from services.prefill.scheduler import ExportExpired, Seal
from services.prefill.server import PrefillStreamEvent


class PrefillOutbox:
    """One hop into the asyncio loop a turn."""

    def __init__(
        self, handoffs: HandoffLog, streams: AttemptStreams[PrefillStreamEvent], recent: RecentAttempts
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handoffs = handoffs
        self._streams = streams
        self._recent = recent

    def emit(self, events: list[PrefillEvent]) -> None:
        """From the engine thread; never blocks."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending
            self._loop.call_soon_threadsafe(self.deliver, events)

    def deliver(self, events: list[PrefillEvent]) -> None:
        """In the loop."""
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
