"""Who may come in: the ASGI layer that asks for an API key, and where it leaves the caller's tenant.

`routes` puts it on, inside `envelope`, when the router has keys. It knows headers and paths, and nothing of bodies.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.edge.api_keys import ApiKeys
from services.router.edge.http_errors import InvalidApiKey, error_response

PUBLIC_PATHS = frozenset({"/health", "/ready"})
"""What asks whether a process lives has no key."""

_STATE = "tenant"


class ApiKeyMiddleware:
    """Lets a request with a key of the ring in as its tenant's; answers every other one 401, whatever its path."""

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
        """Raises `InvalidApiKey`, which tells the client what to mend but repeats nothing that it sent."""
        given = headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidApiKey("an API key is needed, as the header Authorization: Bearer <key>")
        tenant = self._keys.tenant_of(key.strip())
        if tenant is None:
            raise InvalidApiKey("this API key is not known here")
        return tenant


def tenant_of(connection: HTTPConnection) -> str:
    """Whose request it is; "" where no keys are asked for."""
    tenant = getattr(connection.state, _STATE, "")
    return tenant if isinstance(tenant, str) else ""
