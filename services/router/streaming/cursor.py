"""Where a client is in a streamed answer: the ids of its events. `stream` writes them, `resume` reads them back.

The choices of one answer interleave differently every time they are computed, so a running number would say nothing to
another run. An id is a vector: `<request_id>:<events of choice 0>.<events of choice 1>...` counts what was sent of each
choice, the event itself included (a choice's own events are the same in every run, one a token); the events after the
last choice's last one, usage and `[DONE]`, add `+1`, `+2`. Knows neither HTTP nor what is in an event.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.domain.errors import InvalidRequest
from baton.domain.ids import RequestId
from services.router.openai.fields import short_repr

MAX_CURSOR_CHARS = 8192
"""Room for the choices of the longest list of prompts, with a few digits each."""

_PATTERN = re.compile(
    r"(?P<request_id>[A-Za-z0-9_-]{1,128}):(?P<counts>\d{1,9}(?:\.\d{1,9})*)?(?:\+(?P<tail>[12]))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Cursor:
    """What a client has of the answer to `request_id`: events of each choice, and events after all of them."""

    request_id: RequestId
    counts: tuple[int, ...]
    num_tail: int = 0

    def __str__(self) -> str:
        tail = f"+{self.num_tail}" if self.num_tail else ""
        return f"{self.request_id}:{'.'.join(map(str, self.counts))}{tail}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The cursor in a `Last-Event-ID`. Raises `InvalidRequest`."""
        found = _PATTERN.fullmatch(text) if len(text) <= MAX_CURSOR_CHARS else None
        if found is None:
            raise InvalidRequest(f"{short_repr(text)} is no event id of this service", param="last_event_id")
        counts = tuple(int(count) for count in found["counts"].split(".")) if found["counts"] else ()
        return cls(RequestId(found["request_id"]), counts, int(found["tail"] or 0))
