"""The trace of a run: what happened when and where, as lines that a seed always repeats. Written to by every room.

The products' own log lines are part of it. `digest` names a whole run; `story` picks what concerns one request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from baton.domain.ids import RequestId

_UNINTERESTING = frozenset({"event", "level", "exc_info"})


@dataclass(frozen=True, slots=True)
class Entry:
    """`subject` is the request it concerns; None: the whole cluster."""

    at_s: float
    place: str
    text: str
    subject: RequestId | None = None

    def __str__(self) -> str:
        return f"{self.at_s:9.4f}  {self.place:<22} {self.text}" + (f"  [{self.subject}]" if self.subject else "")


class Trace:
    """In order of time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.entries: list[Entry] = []

    def note(self, place: str, text: str, subject: RequestId | None = None) -> None:
        """Adds a line, now."""
        self.entries.append(Entry(self._clock(), place, text, subject))

    def digest(self) -> str:
        """Equal for equal runs."""
        joined = "\n".join(map(str, self.entries))
        return hashlib.sha256(joined.encode()).hexdigest()

    def story(self, subject: RequestId | None, max_entries: int) -> list[Entry]:
        """The last `max_entries` that concern `subject` or the whole cluster; without a subject, simply the last."""
        wanted = [e for e in self.entries if subject is None or e.subject in (None, subject)]
        return wanted[-max_entries:]


@contextmanager
def product_logs_in(trace: Trace, place: Callable[[], str]) -> Iterator[None]:
    """Inside, what the product logs becomes part of `trace` and is printed nowhere."""

    def record(logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in _UNINTERESTING)
        subject = event.get("request_id") or str(event.get("id", "")).rpartition("/")[0]
        trace.note(place(), f"log {event['event']} {fields}".rstrip(), RequestId(subject) if subject else None)
        raise structlog.DropEvent

    processors: list[Any] = structlog.get_config()["processors"]
    before = list(processors)
    processors[:] = [record]
    try:
        yield
    finally:
        processors[:] = before
