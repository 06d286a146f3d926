"""Ids of one client request that travel with it: HTTP headers at the edge, gRPC metadata between processes.

They correlate logs and traces. No state is keyed by them.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from functools import lru_cache

from baton.domain.values.quick_init import quick_init

MAX_HTTP_REQUEST_ID_CHARS = 128

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_UNWANTED = re.compile(r"[^!-~]+")
"""All but visible ASCII."""

_SAMPLED = 0x01
_MAX_KEPT_CHARS = 256


@quick_init
@dataclass(frozen=True, slots=True)
class TraceContext:
    """`http_request_id`: the client's `x-request-id`. The other fields are W3C Trace Context's; empty where absent."""

    http_request_id: str = ""
    trace_id: str = ""
    parent_span_id: str = ""
    sampled: bool = False

    @property
    def traceparent(self) -> str:
        """The header that continues this trace; empty without a trace."""
        if not self.trace_id:
            return ""
        return f"00-{self.trace_id}-{self.parent_span_id or new_span_id()}-{_SAMPLED if self.sampled else 0:02x}"


NO_TRACE_CONTEXT = TraceContext()
"""A request that brought no ids."""


def read_trace_context(http_request_id: str, traceparent: str) -> TraceContext:
    """The context of two headers. A malformed `traceparent` counts as absent; other values are cut or cleaned.

    Several modules read the ids of one request, so the latest contexts are kept.
    """
    if len(http_request_id) + len(traceparent) > _MAX_KEPT_CHARS:
        return _read(http_request_id, traceparent)
    return _kept(http_request_id, traceparent)


def _read(http_request_id: str, traceparent: str) -> TraceContext:
    name = _UNWANTED.sub("", http_request_id[:MAX_HTTP_REQUEST_ID_CHARS])
    found = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent else None
    if found is None or not found[1].strip("0") or not found[2].strip("0"):
        return TraceContext(name)
    return TraceContext(name, found[1], found[2], bool(int(found[3], 16) & _SAMPLED))


_kept = lru_cache(maxsize=256)(_read)


def new_trace_id() -> str:
    """A random trace id: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def new_span_id() -> str:
    """A random span id: 16 hexadecimal digits."""
    return secrets.token_hex(8)
