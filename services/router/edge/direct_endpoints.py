"""The short way of a request to an endpoint that generates: past Starlette's layers, which it does not need.

Starlette looks a route up and wraps `send` in each of its layers: a fifth of the Python calls that a short request
makes on the HTTP side. A request of a browser, with an `Origin`, takes the long way: its layers answer it for CORS.
Both ways do the same: request id and figures (`middleware`), API key, endpoint, one handler of errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.domain.errors import BatonError
from baton.services.router.edge.api_keys import ApiKeys
from baton.services.router.edge.auth_middleware import authenticate
from baton.services.router.edge.headers import has_header
from baton.services.router.edge.middleware import RateHeaders, RequestMiddleware

Endpoint = Callable[[Request], Awaitable[Response]]
OnError = Callable[[Request, Exception], Awaitable[Response]]


class DirectEndpoints:
    """ASGI. Calls the endpoint of a path that `RouterApp` found here."""

    def __init__(self, routes: Mapping[str, Route], keys: ApiKeys | None, on_error: OnError) -> None:
        self._routes = routes
        self._keys = keys
        self._on_error = on_error

    def takes(self, scope: Scope) -> bool:
        """True for a `POST` to one of the paths, unless a browser sent it."""
        return (
            scope["type"] == "http"
            and scope["path"] in self._routes
            and scope["method"] == "POST"
            and not has_header(scope, b"origin")
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        request, route = Request(scope, receive), self._routes[scope["path"]]
        try:
            if self._keys is not None:
                authenticate(scope, self._keys)
            scope["route"] = route
            response = await route.endpoint(request)
            await response(scope, receive, send)
        except (BatonError, HTTPException) as error:  # no byte is sent: a response raises no error after its first one
            response = await self._on_error(request, error)
            await response(scope, receive, send)


class RouterApp(Starlette):
    """Starlette, and the short way beside it."""

    def __init__(
        self,
        direct: DirectEndpoints,
        rate_headers: RateHeaders,
        direct_headers: Mapping[str, str],
        **starlette: Any,
    ) -> None:
        """`direct_headers`: of every response of the short way, such as those that a layer of the long way adds."""
        super().__init__(**starlette)
        self._direct = direct
        self._short_way = RequestMiddleware(direct, rate_headers, direct_headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if self._direct.takes(scope):
            await self._short_way(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
