"""Reads a request's body into a JSON object, within its bounds of size and time.

`routes` calls it; what the object's fields mean is `validation`'s business.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import ClientDisconnect, Request

from baton.domain.errors import Cancelled, InvalidRequest
from services.router.api.budget import Take
from services.router.api.fields import shown
from services.router.api.http_errors import BodyTooLarge, BodyTooSlow, UnsupportedContentType

READ_TIMEOUT_S = 60.0

MAX_DEPTH = 64
"""Objects and lists within each other. A template may walk them with as many calls, and Python allows not many more."""

_TOO_DEEP = f"the body's JSON is nested too deeply: more than {MAX_DEPTH} levels"
_decoder = msgspec.json.Decoder()


async def read_body(request: Request, max_body_bytes: int, take: Take = lambda num_bytes: None) -> bytes:
    """The whole body; a larger one is not read to its end. `take` hears of all bytes as they come.

    Raises `BodyTooLarge`, `BodyTooSlow`, `UnsupportedContentType`, what `take` raises, or `Cancelled` when the client
    goes away.
    """
    _check_content_type(request.headers.get("content-type", ""))
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced[:20]) > max_body_bytes:
        raise BodyTooLarge(f"the body may have {max_body_bytes} bytes, not {announced[:20]}")
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read(request, max_body_bytes, take)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client went away before its request had come") from None


async def _read(request: Request, max_body_bytes: int, take: Take) -> bytes:
    body = bytearray()
    async for part in request.stream():
        take(len(part))
        body += part
        if len(body) > max_body_bytes:
            raise BodyTooLarge(f"the body may have {max_body_bytes} bytes")
    return bytes(body)


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises `InvalidRequest`: malformed, nested too deeply, or no object."""
    try:
        value = _decoder.decode(body)
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    except ValueError as error:  # msgspec's own errors, bad UTF-8, numbers without end
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {shown(value)}")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and not _is_shallow(value):
        raise InvalidRequest(_TOO_DEEP)
    return value


def _is_shallow(value: object) -> bool:
    """Whether `value` has at most `MAX_DEPTH` levels, walked level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
        if not level:
            return True
    return False


def _check_content_type(value: str) -> None:
    """No content type at all is taken for JSON."""
    media_type = value.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedContentType(f"the body must be application/json, not {shown(media_type)}")
