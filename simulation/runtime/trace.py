"""The trace of a run: events with time and place, as lines that a seed always repeats. All modules write to it.

The product's own log lines are part of it. `digest` identifies a run; `entries_for` selects the lines of one request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from baton.domain.ids import RequestId

LATE = "late for "
"""Begins the line of a message or read that is late, by the seconds that follow."""

BROKE = "the connection broke"
"""Ends the line of a call or session that a lost message has ended."""

_UNINTERESTING = frozenset({"event", "level", "exc_info"})


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A line. `request_id`: its request; None: the whole cluster."""

    at_s: float
    source: str
    text: str
    request_id: RequestId | None = None

    def __str__(self) -> str:
        return f"{self.at_s:9.4f}  {self.source:<22} {self.text}" + (
            f"  [{self.request_id}]" if self.request_id else ""
        )


class Trace:
    """Lines in order of time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.entries: list[TraceEntry] = []

    def note(self, source: str, text: str, request_id: RequestId | None = None) -> None:
        """Adds a line at the present time."""
        self.entries.append(TraceEntry(self._clock(), source, text, request_id))

    def digest(self) -> str:
        """Equal for equal runs."""
        joined = "\n".join(map(str, self.entries))
        return hashlib.sha256(joined.encode()).hexdigest()

    def entries_for(self, request_id: RequestId | None, max_entries: int) -> list[TraceEntry]:
        """The last `max_entries` lines of `request_id` or of the whole cluster; without an id, the last lines."""
        wanted = [e for e in self.entries if request_id is None or e.request_id in (None, request_id)]
        return wanted[-max_entries:]


@contextmanager
def product_logs_in(trace: Trace, source: Callable[[], str]) -> Iterator[None]:
    """Context in which the product's log lines go to `trace` only."""

    def record(logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in _UNINTERESTING)
        request_id = event.get("request_id") or str(event.get("id", "")).rpartition("/")[0]
        trace.note(source(), f"log {event['event']} {fields}".rstrip(), RequestId(request_id) if request_id else None)
        raise structlog.DropEvent

    processors: list[Any] = structlog.get_config()["processors"]
    before = list(processors)
    processors[:] = [record]
    try:
        yield
    finally:
        processors[:] = before
