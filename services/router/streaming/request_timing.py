"""What the HTTP side tells about a sequence's life, for metrics and traces. `app` wires it to `baton.telemetry`.

`routes` and `respond` calls it on the event loop; a timing sink may neither block nor raise.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import Protocol

from baton.domain.errors import BatonError, Broken, Cancelled, Refused
from baton.domain.ids import RequestId
from services.router.text.choice_text import TokenEvent


class SequenceOutcome(enum.Enum):
    """How a sequence ended; the metric label."""

    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TimingSink(Protocol):
    """Each sequence: one arrival, then its tokens in order, then one finish."""

    def on_arrival(self, request_id: RequestId, arrived_s: float) -> None:
        """The sequence has been tokenised; its HTTP request came at `arrived_s` on `time.monotonic`'s clock."""
        ...

    def on_first_token(self, request_id: RequestId) -> None:
        """The first token was sent to the client (or added to an answer that is sent whole)."""
        ...

    def on_token(self, request_id: RequestId) -> None:
        """The same for every later token."""
        ...

    def on_finish(self, request_id: RequestId, outcome: SequenceOutcome, code: str) -> None:
        """The end. `code`: the finish reason, or the error's code. A request refused as invalid has only this."""
        ...


class NullTimingSink:
    """Looks away."""

    def on_arrival(self, request_id: RequestId, arrived_s: float) -> None:
        """Nothing."""

    def on_first_token(self, request_id: RequestId) -> None:
        """Nothing."""

    def on_token(self, request_id: RequestId) -> None:
        """Nothing."""

    def on_finish(self, request_id: RequestId, outcome: SequenceOutcome, code: str) -> None:
        """Nothing."""


class RequestTiming:
    """Tells a timing sink about all sequences of one request; makes sure that each ends exactly once."""

    def __init__(self, timing_sink: TimingSink, request_ids: Sequence[RequestId], arrived_s: float) -> None:
        """`request_ids` by choice."""
        self._timing_sink = timing_sink
        self._running = dict(enumerate(request_ids))
        self._started: set[int] = set()
        for request_id in request_ids:
            timing_sink.on_arrival(request_id, arrived_s)

    def on_event_sent(self, event: TokenEvent) -> None:
        """An event has gone to the client."""
        request_id = self._running.get(event.choice)
        if request_id is None:
            return
        if event.token is not None and event.choice not in self._started:
            self._started.add(event.choice)
            self._timing_sink.on_first_token(request_id)
        elif event.token is not None:
            self._timing_sink.on_token(request_id)
        if event.finish is not None:
            del self._running[event.choice]
            self._timing_sink.on_finish(request_id, SequenceOutcome.FINISHED, event.finish.value)

    def on_error(self, error: BaseException) -> None:
        """The request is over: choices that have not finished ended by `error`."""
        outcome, code = outcome_of(error)
        for request_id in self._running.values():
            self._timing_sink.on_finish(request_id, outcome, code)
        self._running.clear()


def outcome_of(error: BaseException) -> tuple[SequenceOutcome, str]:
    """How an error ends a sequence, and the code it is counted under."""
    match error:
        case Refused():
            return SequenceOutcome.REFUSED, error.code
        case Cancelled() | asyncio.CancelledError():
            return SequenceOutcome.CANCELLED, Cancelled.code
        case BatonError():
            return SequenceOutcome.FAILED, error.code
        case _:
            return SequenceOutcome.FAILED, Broken.code
