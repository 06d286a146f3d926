"""Maps errors to HTTP: a status and headers before the first byte, an error event after it.

Every error of `routes`, `respond` and `resume` passes here. An error outside the `BatonError` tree is a bug: the caller
logs it, and the client gets "internal error".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.domain.errors import (
    AnswerLost,
    BatonError,
    Broken,
    Cancelled,
    ConstraintFailed,
    ContextOverflow,
    DeadlineExceeded,
    Draining,
    IntegrityFailure,
    Interrupted,
    InvalidRequest,
    LeaseEnded,
    LinkBroken,
    ModelNotFound,
    ModelReplaced,
    NeedMedia,
    NoRoom,
    NoWorkers,
    Overloaded,
    Refused,
    SentBack,
    Superseded,
    WorkerLost,
)
from baton.services.router.openai.schemas import ErrorBody, ErrorEnvelope

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1, 120
MAX_MESSAGE_BYTES = 4096


class BodyTooLarge(InvalidRequest):
    """The body has more bytes than allowed."""

    code = "body_too_large"


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""

    code = "body_timeout"


class UnsupportedContentType(InvalidRequest):
    """The content type is not JSON."""

    code = "unsupported_content_type"


class MalformedHttp(InvalidRequest):
    """The bytes on the connection are not an HTTP request."""

    code = "malformed_http"


class HeadTooLarge(InvalidRequest):
    """Request line and headers have more bytes than allowed."""

    code = "head_too_large"


class HeadTooSlow(InvalidRequest):
    """Request line and headers did not arrive in time."""

    code = "head_timeout"


class InvalidApiKey(Refused):
    """The API key is missing or unknown."""

    code = "invalid_api_key"


class PathNotFound(InvalidRequest):
    """No route has this path."""

    code = "not_found"


class RequestNotFound(InvalidRequest):
    """The request does not exist, or belongs to another tenant."""

    code = "request_not_found"


class ForeignCall(NoWorkers):
    """No router answers the call, and this one has another tokenizer or chat template than the call."""

    code = "other_tokenizer"


class NotReady(NoWorkers):
    """`GET /ready` before a pair of workers is linked."""

    code = "not_ready"


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error as the client gets it."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        """The response, if no byte has been sent."""
        return Response(self.json(), self.status, dict(self.headers), "application/json")

    def json(self) -> bytes:
        """The JSON envelope; also the data of an error event."""
        return msgspec.json.encode(ErrorEnvelope(self.body))


@dataclass(frozen=True, slots=True)
class _ErrorKind:
    status: int
    type: str
    can_retry: bool = False
    closes: bool = False
    wants_key: bool = False


_INTERNAL = _ErrorKind(500, "server_error")

# The nearest base class decides.
_ERROR_KINDS: dict[type[BatonError], _ErrorKind] = {
    InvalidRequest: _ErrorKind(400, "invalid_request_error"),
    ContextOverflow: _ErrorKind(400, "invalid_request_error"),
    ConstraintFailed: _ErrorKind(400, "invalid_request_error"),
    BodyTooLarge: _ErrorKind(413, "invalid_request_error", closes=True),
    BodyTooSlow: _ErrorKind(408, "invalid_request_error", closes=True),
    MalformedHttp: _ErrorKind(400, "invalid_request_error", closes=True),
    HeadTooLarge: _ErrorKind(431, "invalid_request_error", closes=True),
    HeadTooSlow: _ErrorKind(408, "invalid_request_error", closes=True),
    UnsupportedContentType: _ErrorKind(415, "invalid_request_error"),
    InvalidApiKey: _ErrorKind(401, "invalid_request_error", wants_key=True),
    PathNotFound: _ErrorKind(404, "invalid_request_error"),
    ModelNotFound: _ErrorKind(404, "invalid_request_error"),
    RequestNotFound: _ErrorKind(404, "invalid_request_error"),
    AnswerLost: _ErrorKind(404, "invalid_request_error"),
    Overloaded: _ErrorKind(429, "rate_limit_error", can_retry=True),
    NoWorkers: _ErrorKind(503, "service_unavailable_error", can_retry=True),
    Draining: _ErrorKind(503, "service_unavailable_error", can_retry=True),
    Refused: _ErrorKind(503, "service_unavailable_error", can_retry=True),
    Interrupted: _ErrorKind(
        503, "service_unavailable_error", can_retry=True
    ),  # all attempts failed; the request itself is fine
    Cancelled: _ErrorKind(499, "cancelled_error"),  # the client is gone
    DeadlineExceeded: _ErrorKind(504, "timeout_error"),
    Broken: _INTERNAL,
}

# What clients read of a lost attempt. Its own message names workers, and is for logs. The nearest base class decides.
_MESSAGES: dict[type[BatonError], str] = {
    Interrupted: "the answer was interrupted: send the request again",
    WorkerLost: "a worker was lost or missing before the answer was complete: send the request again",
    LinkBroken: "the connection between two workers failed: send the request again",
    LeaseEnded: "a worker did not get its data in time: send the request again",
    IntegrityFailure: "data that a worker received was damaged: send the request again",
    Superseded: "the request is continued elsewhere: resume it, or send it again",
    NoRoom: "the workers had no room for the request: send it again",
    SentBack: "the workers ran out of memory: send the request again",
    NeedMedia: "a worker has lost an image of the request: send the request again",
    ModelReplaced: "the workers that began the answer are gone, and those present have another model: "
    "send the request again",
}


def error_response(error: BaseException) -> ErrorResponse:
    """The response to `error`."""
    if isinstance(error, HTTPException):
        return _http_reply(error)
    kind = next((_ERROR_KINDS[base] for base in type(error).__mro__ if base in _ERROR_KINDS), _INTERNAL)
    if kind is _INTERNAL or not isinstance(error, BatonError):
        return ErrorResponse(500, ErrorBody("internal error", "server_error", None, "internal_error"))
    param = error.param if isinstance(error, Refused) else None
    body = ErrorBody(_bounded(_message(error)) or error.code, kind.type, param, error.code)
    return ErrorResponse(kind.status, body, _headers(kind, error))


def is_internal_error(error: BaseException) -> bool:
    """True if the response is a 500 and the error must be logged."""
    return error_response(error).status == 500


def _headers(kind: _ErrorKind, error: BatonError) -> dict[str, str]:
    headers = {"connection": "close"} if kind.closes else {}
    if kind.wants_key:
        headers["www-authenticate"] = "Bearer"
    if kind.can_retry:
        after_s = error.retry_after_s if isinstance(error, Refused) else None
        headers["retry-after"] = str(_clamped(after_s))
    return headers


def _message(error: BatonError) -> str:
    return next((_MESSAGES[base] for base in type(error).__mro__ if base in _MESSAGES), str(error))


def _bounded(message: str) -> str:
    """At most `MAX_MESSAGE_BYTES` of the message, valid UTF-8."""
    return message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")


def _clamped(retry_after_s: float | None) -> int:
    wanted = math.ceil(retry_after_s) if retry_after_s is not None else MIN_RETRY_AFTER_S
    return min(max(wanted, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def _http_reply(error: HTTPException) -> ErrorResponse:
    """Unknown path, or unsupported method."""
    messages = {404: ("no such path", "not_found"), 405: ("this path does not take this method", "method_not_allowed")}
    message, code = messages.get(error.status_code, (error.detail, "http_error"))
    return ErrorResponse(
        error.status_code, ErrorBody(message, "invalid_request_error", None, code), error.headers or {}
    )
