"""ASGI middleware that requires an API key and puts its tenant into the scope. Added by `routes` if there are keys."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.services.router.edge.api_keys import ApiKeys
from baton.services.router.edge.http_errors import InvalidApiKey, error_response

PUBLIC_PATHS = frozenset({"/", "/health", "/ready"})
"""Probes have no key; the page asks for one."""

PUBLIC_PREFIX = "/ui/"
"""The page's files hold no data."""

KEY_HEADERS = ("authorization", "x-api-key", "api-key")
"""Headers of OpenAI's, Anthropic's and Azure's clients."""

_STATE = "tenant"
_OPERATOR = "operator"


class ApiKeyMiddleware:
    """Admits requests with a known key; answers all others 401, whatever their path."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and not _is_public(scope):
            try:
                authenticate(scope, self._keys)
            except InvalidApiKey as error:
                await error_response(error).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def authenticate(scope: Scope, keys: ApiKeys) -> None:
    """Puts the tenant of the request's key into the scope. Raises `InvalidApiKey`, which repeats nothing of it."""
    key = _key_of(Headers(scope=scope))
    if not key:
        raise InvalidApiKey("an API key is needed, as the header Authorization: Bearer <key>, x-api-key or api-key")
    entry = keys.find(key)
    if entry is None:
        raise InvalidApiKey("this API key is not known here")
    scope.setdefault("state", {}).update({_STATE: entry.tenant, _OPERATOR: entry.operator})


def _is_public(scope: Scope) -> bool:
    """True for what needs no key: probes, and the page's files, which are only read."""
    path = scope["path"]
    is_page = path == "/" or path.startswith(PUBLIC_PREFIX)
    return (path in PUBLIC_PATHS or is_page) and (not is_page or scope["method"] in ("GET", "HEAD"))


def _key_of(headers: Headers) -> str:
    """The key; "" without one, or with different ones: which of them counts must not depend on a proxy."""
    given = {_read_key(name, value) for name in KEY_HEADERS for value in headers.getlist(name)}
    return given.pop() if len(given) == 1 else ""


def _read_key(name: str, value: str) -> str:
    """The key in one header; "" if it is malformed."""
    if name != "authorization":
        return value.strip()
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def tenant_of(connection: HTTPConnection) -> str:
    """The tenant of a request; "" without API keys."""
    return tenant_in(connection.scope)


def tenant_in(scope: Scope) -> str:
    """The same, of an ASGI scope."""
    tenant = scope.get("state", {}).get(_STATE, "")
    return tenant if isinstance(tenant, str) else ""


def is_operator(connection: HTTPConnection) -> bool:
    """True if the caller may see the whole cluster: with a key marked `operator`, or where no keys are needed."""
    return getattr(connection.state, _OPERATOR, True) is True
