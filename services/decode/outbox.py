"""The outbox: carries the decode engine's effects to the rooms that perform them. Called from the engine's threads."""

from __future__ import annotations

import asyncio
import contextlib

from baton.domain.ids import WorkerId
from baton.telemetry import metrics
from baton.transfer.base import PullEvent, PullOutcome
from baton.worker.streams import AttemptStreams
from services.decode.effects import (
    AbortHandoff,
    AskCommit,
    ConfirmCommit,
    OutwardEffect,
    Preempted,
    ReportImported,
    ReportLocalPrompt,
)
from services.decode.handoff_client import HandoffClient
from services.decode.server import DecodeStreamEvent


class DecodeOutbox:
    """One hop into the asyncio loop a turn; what is for a router goes to its stream, what is for prefill to it."""

    def __init__(
        self, worker_id: WorkerId, transport: str, streams: AttemptStreams[DecodeStreamEvent], handoffs: HandoffClient
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker_id = worker_id
        self._transport = transport
        self._streams = streams
        self._handoffs = handoffs

    def emit(self, effects: list[OutwardEffect]) -> None:
        """From the engine thread; never blocks."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending
            self._loop.call_soon_threadsafe(self._perform, effects)

    def record_pull(self, event: PullEvent) -> None:
        """From the transfer thread: what has moved."""
        if event.outcome is PullOutcome.LATE:
            return
        labels = (self._link(event.pull.source), self._transport)
        metrics.TRANSFER_BYTES_TOTAL.labels(*labels).inc(event.num_bytes)
        metrics.TRANSFER_SECONDS.labels(*labels).observe(event.seconds)
        metrics.TRANSFER_DESCRIPTORS.labels(*labels).observe(len(event.pull.local_pages))

    def _perform(self, effects: list[OutwardEffect]) -> None:
        for effect in effects:
            match effect:
                case AskCommit(id):
                    self._handoffs.commit(id, wants_reply=True)
                case ConfirmCommit(id):
                    self._handoffs.commit(id, wants_reply=False)
                case AbortHandoff(id):
                    self._handoffs.abort(id)
                case ReportImported():
                    exposed = metrics.TRANSFER_EXPOSED_SECONDS.labels(self._link(effect.source), self._transport)
                    exposed.observe(effect.exposed_s)
                    self._streams.deliver(effect.id, effect)
                case Preempted() | ReportLocalPrompt():
                    pass
                case _:
                    self._streams.deliver(effect.id, effect)

    def _link(self, source: WorkerId) -> str:
        return f"{source}->{self._worker_id}"
