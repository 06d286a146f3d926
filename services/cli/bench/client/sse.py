"""Splits a stream of bytes into the data of server-sent events. Used by `answer_meter`; does not interpret them.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations


class EventSplitter:
    """Incremental parser: returns the data of every completed event, without comments and ids."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that `data` completes, in order; lines of one event joined by newlines."""
        data = self._rest + data
        if b"\r" in data:
            data = _normalize_newlines(data)
        *events, self._rest = data.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event)) is not None]


def _normalize_newlines(data: bytes) -> bytes:
    """Line ends as single newlines; a final \\r waits for the next bytes."""
    whole, held = (data[:-1], b"\r") if data.endswith(b"\r") else (data, b"")
    return whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held


def _payload(event: bytes) -> bytes | None:
    """The data lines of one event; None for an event without any, such as a ping."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
