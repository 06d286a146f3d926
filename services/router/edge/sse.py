"""Framing of server-sent events. Knows nothing of their content.

An `id:` line lets an SSE client resume, but breaks two kinds of OpenAI clients: load tools that expect only `data: `
lines, and SDKs that treat a comment after an id as an event. By default only clients that accept `text/event-stream`
get ids, as every SSE client does.
"""

from __future__ import annotations

from starlette.types import Scope

from baton.services.router.edge.headers import header

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PING = b": ping\n\n"
DONE = b"[DONE]"


def accepts_event_ids(scope: Scope) -> bool:
    """True for an SSE client, by its `accept` header."""
    return "text/event-stream" in header(scope, b"accept").lower()


def event(data: bytes, id: bytes | None) -> bytes:
    """One event. `data` is one line: JSON, or `DONE`."""
    return b"data: %b\n\n" % data if id is None else b"id: %b\ndata: %b\n\n" % (id, data)


def named_event(name: bytes, data: bytes) -> bytes:
    """One event with a type. `data` is one line."""
    return b"event: %b\ndata: %b\n\n" % (name, data)
