"""What the HTTP side tells about a sequence's life, for metrics and traces. `app` wires it to `baton.telemetry`.

`routes` and `delivery` call it on the event loop; an observer may neither block nor raise.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import Protocol

from baton.domain.errors import BatonError, Broken, Cancelled, Refused
from baton.domain.ids import RequestId
from services.router.text.choice_text import TokenEvent


class Outcome(enum.Enum):
    """How a sequence ended; the metric label."""

    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Observer(Protocol):
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

    def on_finish(self, request_id: RequestId, outcome: Outcome, code: str) -> None:
        """The end. `code`: the finish reason, or the error's code. A call refused as invalid has only this."""
        ...


class NullObserver:
    """Looks away."""

    def on_arrival(self, request_id: RequestId, arrived_s: float) -> None:
        """Nothing."""

    def on_first_token(self, request_id: RequestId) -> None:
        """Nothing."""

    def on_token(self, request_id: RequestId) -> None:
        """Nothing."""

    def on_finish(self, request_id: RequestId, outcome: Outcome, code: str) -> None:
        """Nothing."""


class CallReport:
    """Tells an observer about all sequences of one call; makes sure that each ends exactly once."""

    def __init__(self, observer: Observer, request_ids: Sequence[RequestId], arrived_s: float) -> None:
        """`request_ids` by choice."""
        self._observer = observer
        self._running = dict(enumerate(request_ids))
        self._begun: set[int] = set()
        for request_id in request_ids:
            observer.on_arrival(request_id, arrived_s)

    def sent(self, event: TokenEvent) -> None:
        """An event has gone to the client."""
        request_id = self._running.get(event.choice)
        if request_id is None:
            return
        if event.token is not None and event.choice not in self._begun:
            self._begun.add(event.choice)
            self._observer.on_first_token(request_id)
        elif event.token is not None:
            self._observer.on_token(request_id)
        if event.finish is not None:
            del self._running[event.choice]
            self._observer.on_finish(request_id, Outcome.FINISHED, event.finish.value)

    def ended(self, error: BaseException) -> None:
        """The call is over: choices that have not finished ended by `error`."""
        outcome, code = ending(error)
        for request_id in self._running.values():
            self._observer.on_finish(request_id, outcome, code)
        self._running.clear()


def ending(error: BaseException) -> tuple[Outcome, str]:
    """How an error ends a sequence, and the code it is counted under."""
    match error:
        case Refused():
            return Outcome.REFUSED, error.code
        case Cancelled() | asyncio.CancelledError():
            return Outcome.CANCELLED, Cancelled.code
        case BatonError():
            return Outcome.FAILED, error.code
        case _:
            return Outcome.FAILED, Broken.code
