"""What every HTTP exchange has: a request id, the time it took, and an answer even when our code fails.

The outermost ASGI layer, put on by `routes`. It decides by no path and reads no body.
"""

from __future__ import annotations

import re
import secrets
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.telemetry import metrics
from services.router.edge.http_errors import error_response

MAX_REQUEST_ID_CHARS = 128
MAX_LOGGED_CHARS = 256

_UNWANTED = re.compile(r"[^A-Za-z0-9._:/+=@-]")

log = structlog.get_logger(__name__)


class RequestMiddleware:
    """Adds `x-request-id` (the client's, sanitize_request_id, or a fresh one) and `openai-processing-ms`; counts
    responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The root of every request: no exception of ours leaves here while it can still be answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_s = time.perf_counter()
        request_id = sanitize_request_id(Headers(scope=scope).get("x-request-id", "")) or new_request_id()
        started = False

        async def send_enveloped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                metrics.HTTP_RESPONSES_TOTAL.labels(_route(scope), str(message["status"])).inc()
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.perf_counter() - arrived_s) * 1000))
            await send(message)

        with structlog.contextvars.bound_contextvars(http_request_id=request_id):
            try:
                await self._app(scope, receive, send_enveloped)
            except Exception as error:
                log.exception("request_failed", path=scope["path"][:MAX_LOGGED_CHARS])
                if not started:
                    await error_response(error).response()(scope, receive, send_enveloped)


def _route(scope: Scope) -> str:
    """The path as declared, so that clients cannot invent label values."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "none"


def new_request_id() -> str:
    """For a client that sends none."""
    return secrets.token_hex(16)


def sanitize_request_id(request_id: str) -> str:
    """At most `MAX_REQUEST_ID_CHARS` harmless characters of a client's request id; "" if it has none."""
    return _UNWANTED.sub("", request_id)[:MAX_REQUEST_ID_CHARS]
