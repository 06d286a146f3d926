"""Event ids of a streamed response. `sse_stream` writes them, `resume` reads them.

Choices interleave differently in every run, so a running number would not survive a resume. An id is a vector,
`<request id>:<events of choice 0>.<events of choice 1>...`, which includes the event itself; the events of one choice
are the same in every run. `~` and 8 hexadecimal digits after a number are the CRC-32 of the choice's tokens, so that a
router that continues the answer can tell whether they are the same there; a number without them is not compared. The
events after all choices, usage and `[DONE]`, add `+1` and `+2`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.domain.errors import InvalidRequest
from baton.domain.ids import RequestId
from baton.services.router.openai.fields import short_repr

MAX_CURSOR_CHARS = 8192
"""Enough for the choices of the longest list of prompts."""

_PATTERN = re.compile(
    r"(?P<request_id>[A-Za-z0-9_-]{1,128}):(?P<choices>{choice}(?:\.{choice})*)?(?:\+(?P<tail>[12]))?".replace(
        "{choice}", r"\d{1,9}(?:~[0-9a-f]{8})?"
    ),
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a client in a response: events of each choice, and events after all choices.

    `digests`: of the tokens of each choice's events (`choice_text.add_token`); None for a choice that is not to be
    compared, () if none is.
    """

    request_id: RequestId
    counts: tuple[int, ...]
    num_tail: int = 0
    digests: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        tail = f"+{self.num_tail}" if self.num_tail else ""
        digests = self.digests or (None,) * len(self.counts)
        pairs = zip(self.counts, digests, strict=True)
        choices = (str(count) if crc is None or not count else f"{count}~{crc:08x}" for count, crc in pairs)
        return f"{self.request_id}:{'.'.join(choices)}{tail}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parses a `Last-Event-ID`. Raises `InvalidRequest`."""
        found = _PATTERN.fullmatch(text) if len(text) <= MAX_CURSOR_CHARS else None
        if found is None:
            raise InvalidRequest(f"{short_repr(text)} is not an event id of this service", param="last_event_id")
        choices = [choice.partition("~") for choice in found["choices"].split(".")] if found["choices"] else []
        counts = tuple(int(count) for count, _, _ in choices)
        digests = tuple(int(crc, 16) if crc else None for _, _, crc in choices)
        if all(digest is None for digest in digests):
            digests = ()
        return cls(RequestId(found["request_id"]), counts, int(found["tail"] or 0), digests)
