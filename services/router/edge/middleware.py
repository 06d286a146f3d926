"""The outermost ASGI middleware: request id, trace context, duration, and a response to unhandled errors."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import structlog
from starlette.requests import HTTPConnection
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.domain.trace_context import NO_TRACE_CONTEXT, TraceContext, read_trace_context
from baton.services.router.edge.auth_middleware import tenant_in
from baton.services.router.edge.headers import header
from baton.services.router.edge.http_errors import error_response
from baton.telemetry import metrics

MAX_REQUEST_ID_CHARS = 128
MAX_LOGGED_CHARS = 256

_STATE = "trace_context"
_UNWANTED = re.compile(r"[^A-Za-z0-9._:/+=@-]")

RateHeaders = Callable[[str], Mapping[str, str]]
"""Headers with the rates of a tenant."""

log = structlog.get_logger(__name__)

_responses_total = cache(metrics.HTTP_RESPONSES_TOTAL.labels)  # of declared paths: the metric keeps its children, too


class RequestMiddleware:
    """Adds `x-request-id` (the client's, sanitized, or a new one), `openai-processing-ms`, the client's
    `traceparent`, and the rates of its tenant; counts responses, and their time to the last byte.

    Binds the id, and the trace id of a `traceparent`, to the log context. Puts both into the scope.
    """

    def __init__(
        self, app: ASGIApp, rate_headers: RateHeaders = lambda tenant: {}, headers: Mapping[str, str] | None = None
    ) -> None:
        """`headers`: further ones of every response."""
        self._app = app
        self._rate_headers = rate_headers
        self._headers = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Turns every unhandled exception into a response while none has started."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_s = time.perf_counter()
        given = header(scope, b"x-request-id")
        request_id = (given and _UNWANTED.sub("", given)[:MAX_REQUEST_ID_CHARS]) or new_request_id()
        context = read_trace_context(request_id, header(scope, b"traceparent"))
        scope.setdefault("state", {})[_STATE] = context
        started, path = False, "none"

        async def send_with_headers(message: Message) -> None:
            nonlocal started, path
            if message["type"] == "http.response.start":
                started = True
                route = scope.get("route")  # the declared path: clients must not choose label values
                path = route.path if isinstance(route, Route) else path
                _responses_total(path, str(message["status"])).inc()
                headers = {"x-request-id": request_id, **self._headers, **self._rate_headers(tenant_in(scope))}
                if context.trace_id:
                    headers["traceparent"] = context.traceparent
                headers["openai-processing-ms"] = str(round((time.perf_counter() - arrived_s) * 1000))
                message["headers"] = _joined(message.get("headers", ()), headers)
            await send(message)

        ids = {"http_request_id": request_id, **({"trace_id": context.trace_id} if context.trace_id else {})}
        bound = structlog.contextvars.bind_contextvars(**ids)
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            log.exception("request_failed", path=scope["path"][:MAX_LOGGED_CHARS])
            if not started:
                await error_response(error).response()(scope, receive, send_with_headers)
        finally:
            structlog.contextvars.reset_contextvars(**bound)
            if started:
                metrics.HTTP_REQUEST_SECONDS.labels(path).observe(time.perf_counter() - arrived_s)


def _joined(given: Iterable[tuple[bytes, bytes]], headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """The given headers, and `headers` in the place of those of the same name."""
    own = {name.encode("latin-1"): value.encode("latin-1") for name, value in headers.items()}
    return [*[pair for pair in given if pair[0] not in own], *own.items()]


def trace_context_of(connection: HTTPConnection) -> TraceContext:
    """The ids that came with a request."""
    context = connection.scope.get("state", {}).get(_STATE)
    return context if isinstance(context, TraceContext) else NO_TRACE_CONTEXT


def new_request_id() -> str:
    """A random id, for clients that send none."""
    return os.urandom(16).hex()
