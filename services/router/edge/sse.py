"""Server-sent events on the wire. `stream` writes them; what is in them is not known here.

An `id:` line lets an SSE client resume, but two kinds of OpenAI clients break on it: load tools that take everything
up to the empty line for `data: ` and JSON, and SDKs that see an event in every comment once an id has come. So by
default only those get ids that ask for `text/event-stream`, as every SSE client does.
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


def accepts_event_ids(headers: Mapping[str, str]) -> bool:
    """Whether the client is an SSE client by its own words."""
    return "text/event-stream" in headers.get("accept", "").lower()


def event(data: bytes, id: bytes | None) -> bytes:
    """One event. `data` is one line: JSON, or `DONE`."""
    return b"data: %b\n\n" % data if id is None else b"id: %b\ndata: %b\n\n" % (id, data)
