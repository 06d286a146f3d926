"""Reads the body of a request within its limits of size and time. Called by `routes`."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from baton.domain.errors import Cancelled
from baton.services.router.edge.body_budget import CountBytes
from baton.services.router.edge.disconnect import connection_of
from baton.services.router.edge.headers import header
from baton.services.router.edge.http_errors import BodyTooLarge, BodyTooSlow, UnsupportedContentType
from baton.services.router.openai.fields import short_repr

READ_TIMEOUT_S = 60.0


async def read_body(request: Request, max_body_bytes: int, count_bytes: CountBytes | None = None) -> bytes:
    """Reads the whole body; stops at `max_body_bytes`. Calls `count_bytes` with the size of every part.

    Raises `BodyTooLarge`, `BodyTooSlow`, `UnsupportedContentType`, the errors of `count_bytes`, or `Cancelled` when the
    client disconnects.
    """
    scope = request.scope
    media_type = header(scope, b"content-type").partition(";")[0].strip().lower()  # none at all means JSON
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedContentType(f"the body must be application/json, not {short_repr(media_type)}")
    encoding = header(scope, b"content-encoding").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedContentType(f"the body must not be compressed, and it is {short_repr(encoding)}")
    content_length = header(scope, b"content-length")
    if content_length.isdigit() and int(content_length[:20]) > max_body_bytes:
        raise BodyTooLarge(f"the body may have {max_body_bytes} bytes, not {content_length[:20]}")
    connection = connection_of(scope)
    if connection is not None and connection.has_body(scope):
        return await _read_parts(request, max_body_bytes, count_bytes)  # without a timer: it waits for nothing
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read_parts(request, max_body_bytes, count_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None


async def _read_parts(request: Request, max_body_bytes: int, count_bytes: CountBytes | None) -> bytes:
    body, has_more = bytearray(), True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client disconnected before its request was complete")
        part, has_more = message.get("body", b""), message.get("more_body", False)
        if count_bytes is not None:
            count_bytes(len(part))
        body += part
        if len(body) > max_body_bytes:
            raise BodyTooLarge(f"the body may have {max_body_bytes} bytes")
    return bytes(body)
