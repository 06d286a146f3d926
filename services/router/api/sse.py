"""Server-sent events on the wire, and their ids. `delivery` writes them; what is in them is not known here.

An `id:` line goes only to clients that ask for `text/event-stream`, as every SSE client does: it lets them resume.
Those that ask for anything else are OpenAI clients, and two kinds of them break on ids: load tools that take everything
up to the empty line for `data: ` and JSON, and SDKs that see an event in every comment once an id has come.
"""

from __future__ import annotations

from collections.abc import Mapping

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PING = b": ping\n\n"
DONE = b"[DONE]"


def wants_ids(headers: Mapping[str, str]) -> bool:
    """Whether the client is an SSE client by its own words."""
    return "text/event-stream" in headers.get("accept", "").lower()


class EventWriter:
    """Numbers the events of one answer from 0: `<request>:<index>`."""

    def __init__(self, request_id: str, *, with_ids: bool) -> None:
        self._request_id = request_id
        self._with_ids = with_ids
        self._num_written = 0

    def event(self, data: bytes) -> bytes:
        """`data` is one line: JSON, or `DONE`."""
        head = f"id: {self._request_id}:{self._num_written}\n".encode() if self._with_ids else b""
        self._num_written += 1
        return b"%bdata: %b\n\n" % (head, data)
