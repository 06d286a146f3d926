"""Prefill's outbox: ends of exports reach who watches them, also late; a repeated call does not end its attempt."""

from __future__ import annotations

import pytest

from baton.domain.errors import BatonError, Cancelled, LeaseEnded, Superseded
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import SampledToken
from baton.domain.timing.attempt_times import PrefillTimes
from baton.engine.handoff.export_events import ExportEnded, ExportExpired, Seal
from baton.engine.messages import Fail
from baton.services.prefill.commands import PrefillEvent
from baton.services.prefill.outbox import PrefillOutbox
from baton.services.prefill.server import PrefillStreamEvent
from baton.worker.handoff.handoff_log import HandoffEvent, HandoffLog
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.streams import AttemptStreams

ID = AttemptId(RequestId("r"), 2)
CHUNK = PublishedChunk(ID, 0, (PageId(0),), (0,))
SEAL = Seal(ID, 0, SampledToken(1), None, 1, PrefillTimes(0, 0, 0, (), 5, 0))


class Worker:
    """The outbox with what it delivers to."""

    def __init__(self) -> None:
        self.handoffs = HandoffLog()
        self.streams: AttemptStreams[PrefillStreamEvent] = AttemptStreams()
        self.outbox = PrefillOutbox(self.handoffs, self.streams, RecentAttempts())

    async def watched(self, *events: PrefillEvent) -> list[HandoffEvent]:
        """What a watcher gets that comes after `events`."""
        self.outbox.deliver([*events])
        return [event async for event in self.handoffs.watch(ID, 0.01)]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (ExportExpired(ID), LeaseEnded(f"{ID}: its lease ended before the commit")),
        (ExportEnded(ID, "the router closed the stream"), Cancelled(f"{ID}: the router closed the stream")),
        (ExportEnded(ID, "committed"), Cancelled(f"{ID}: committed")),
        (Fail(ID, LeaseEnded("not renewed")), LeaseEnded("not renewed")),
        (Fail(ID, Superseded("older", AttemptId(RequestId("r"), 3))), Superseded("older", None)),
    ],
)
async def test_a_watcher_after_the_end_gets_its_cause(end: PrefillEvent, expected: BatonError):
    (event,) = await Worker().watched(CHUNK, SEAL, end)
    assert (type(event), str(event)) == (type(expected), str(expected))


async def test_a_repeated_call_does_not_end_its_attempt():
    worker = Worker()
    worker.streams.open(ID)
    refusal = Fail(ID, Superseded(f"{ID}: attempt 2 was seen already", ID))
    assert await worker.watched(CHUNK, SEAL, refusal) == [CHUNK, SEAL]
    assert await worker.streams.next(ID, 0.01) == SEAL
    assert await worker.streams.next(ID, 0.01) == refusal
