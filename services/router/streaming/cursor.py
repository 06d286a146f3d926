"""Event ids of a streamed response. `sse_stream` writes them, `resume` reads them.

Choices interleave differently in every run, so a running number would not survive a resume. An id is a vector,
`<request id>:<events of choice 0>.<events of choice 1>...`, which includes the event itself; the events of one choice
are the same in every run. The events after all choices, usage and `[DONE]`, add `+1` and `+2`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.domain.errors import InvalidRequest
from baton.domain.ids import RequestId
from services.router.openai.fields import short_repr

MAX_CURSOR_CHARS = 8192
"""Enough for the choices of the longest list of prompts."""

_PATTERN = re.compile(
    r"(?P<request_id>[A-Za-z0-9_-]{1,128}):(?P<counts>\d{1,9}(?:\.\d{1,9})*)?(?:\+(?P<tail>[12]))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a client in a response: events of each choice, and events after all choices."""

    request_id: RequestId
    counts: tuple[int, ...]
    num_tail: int = 0

    def __str__(self) -> str:
        tail = f"+{self.num_tail}" if self.num_tail else ""
        return f"{self.request_id}:{'.'.join(map(str, self.counts))}{tail}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parses a `Last-Event-ID`. Raises `InvalidRequest`."""
        found = _PATTERN.fullmatch(text) if len(text) <= MAX_CURSOR_CHARS else None
        if found is None:
            raise InvalidRequest(f"{short_repr(text)} is not an event id of this service", param="last_event_id")
        counts = tuple(int(count) for count in found["counts"].split(".")) if found["counts"] else ()
        return cls(RequestId(found["request_id"]), counts, int(found["tail"] or 0))
