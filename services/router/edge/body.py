"""Reads a request's body into a JSON object, within its bounds of size and time.

`routes` calls it; what the object's fields mean is `validation`'s business.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from baton.domain.errors import Cancelled
from services.router.edge.body_budget import CountBytes
from services.router.edge.http_errors import BodyTooLarge, BodyTooSlow, UnsupportedContentType
from services.router.openai.fields import short_repr

READ_TIMEOUT_S = 60.0


async def read_body(request: Request, max_body_bytes: int, count_bytes: CountBytes = lambda num_bytes: None) -> bytes:
    """The whole body; a larger one is not read to its end. `count_bytes` hears of all bytes as they come.

    Raises `BodyTooLarge`, `BodyTooSlow`, `UnsupportedContentType`, what `count_bytes` raises, or `Cancelled` when the
    client goes away.
    """
    _check_content_type(request.headers.get("content-type", ""))
    content_length = request.headers.get("content-length", "")
    if content_length.isdigit() and int(content_length[:20]) > max_body_bytes:
        raise BodyTooLarge(f"the body may have {max_body_bytes} bytes, not {content_length[:20]}")
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read(request, max_body_bytes, count_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client went away before its request had come") from None


async def _read(request: Request, max_body_bytes: int, count_bytes: CountBytes) -> bytes:
    body = bytearray()
    async for part in request.stream():
        count_bytes(len(part))
        body += part
        if len(body) > max_body_bytes:
            raise BodyTooLarge(f"the body may have {max_body_bytes} bytes")
    return bytes(body)


def _check_content_type(value: str) -> None:
    """No content type at all is taken for JSON."""
    media_type = value.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedContentType(f"the body must be application/json, not {short_repr(media_type)}")
