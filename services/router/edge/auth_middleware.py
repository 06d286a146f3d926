"""ASGI middleware that requires an API key and puts its tenant into the scope. Added by `routes` if there are keys."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.edge.api_keys import ApiKeys
from services.router.edge.http_errors import InvalidApiKey, error_response

PUBLIC_PATHS = frozenset({"/health", "/ready"})
"""Probes have no key."""

_STATE = "tenant"


class ApiKeyMiddleware:
    """Admits requests with a known key; answers all others 401, whatever their path."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            try:
                scope.setdefault("state", {})[_STATE] = self._tenant(Headers(scope=scope))
            except InvalidApiKey as error:
                await error_response(error).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _tenant(self, headers: Headers) -> str:
        """The tenant of the key. Raises `InvalidApiKey`, which repeats nothing that the client sent."""
        given = headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidApiKey("an API key is needed, as the header Authorization: Bearer <key>")
        tenant = self._keys.tenant_of(key.strip())
        if tenant is None:
            raise InvalidApiKey("this API key is not known here")
        return tenant


def tenant_of(connection: HTTPConnection) -> str:
    """The tenant of a request; "" without API keys."""
    tenant = getattr(connection.state, _STATE, "")
    return tenant if isinstance(tenant, str) else ""
