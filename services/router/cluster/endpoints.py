"""`/v1/cluster` and its parts over HTTP. `routes` adds them.

A key marked `operator` sees everything, another one the counts and the requests of its tenant. Without API keys every
caller sees everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.domain.errors import Cancelled, DeadlineExceeded, InvalidRequest
from baton.services.router.cluster.demo import ActionResult, DemoClient, DemoCommand
from baton.services.router.cluster.feed import ClusterFeed
from baton.services.router.cluster.rows import recent_row
from baton.services.router.cluster.snapshot import ListOrder, PendingTrace, RecentRequests
from baton.services.router.edge.auth_middleware import is_operator, tenant_of
from baton.services.router.edge.body import read_body
from baton.services.router.edge.disconnect import cancel_on_disconnect
from baton.services.router.edge.http_errors import RequestNotFound
from baton.services.router.edge.sse import HEADERS
from baton.services.router.openai.fields import short_repr
from baton.telemetry.request_trace import Outcome, RequestTrace

CLUSTER = "/v1/cluster"
DEMO_HEADER = "x-baton-demo"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
MAX_ACTION_BYTES = 1024
MAX_LISTED = 200
DEFAULT_LISTED = 50
MAX_VIEW_S = 900.0
"""Longest life of one stream of events; the viewer opens another one."""


StoredTrace = Callable[[str, str | None], Awaitable[RequestTrace | None]]
"""Finds the trace of a request that ended in the state store; the tenant is the one it must have, None for any."""


class ClusterEndpoints:
    """The endpoints of one feed. `stored_trace`: for requests that other routers ran."""

    def __init__(self, feed: ClusterFeed, stored_trace: StoredTrace, demo: DemoClient | None = None) -> None:
        self._feed = feed
        self._stored_trace = stored_trace
        self._demo = demo

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(CLUSTER, self.cluster),
            Route(f"{CLUSTER}/events", self.events),
            Route(f"{CLUSTER}/requests", self.requests),
            Route(f"{CLUSTER}/requests/{{id}}", self.request),
            *([Route(f"{CLUSTER}/actions", self.act, methods=["POST"])] if self._demo is not None else []),
        ]

    async def cluster(self, request: Request) -> Response:
        """GET /v1/cluster: the snapshot."""
        return _json(self._feed.snapshot(visible_tenant(request)))

    async def events(self, request: Request) -> Response:
        """GET /v1/cluster/events: the snapshot and what changes, as server-sent events."""
        messages = self._feed.follow(visible_tenant(request))
        return await ClusterStream.open(messages)

    async def requests(self, request: Request) -> Response:
        """GET /v1/cluster/requests: requests that ended lately, here and on routers that share with this one."""
        query = request.query_params
        limit = _number(query.get("limit"), "limit", DEFAULT_LISTED, MAX_LISTED)
        slower_ms = _number(query.get("slower_than_ms"), "slower_than_ms", 0, 10**9)
        outcome = query.get("outcome", "")
        if outcome and outcome not in {each.value for each in Outcome}:
            raise InvalidRequest(f"outcome cannot be {short_repr(outcome)}", param="outcome")
        order = query.get("order", ListOrder.NEWEST)
        if order not in set(ListOrder):
            raise InvalidRequest(f"order cannot be {short_repr(order)}", param="order")
        notable = query.get("notable", "") not in ("", "0", "false")
        view, tenant = self._feed.view, visible_tenant(request)
        if order == ListOrder.SLOWEST:
            rows = [recent_row(trace) for trace in view.held(tenant, notable=notable)]
        else:
            rows = [recent_row(trace) for trace in view.recent(tenant, MAX_LISTED, notable=notable)]
        rows += [row for row in view.ends.foreign(tenant) if row.notable or not notable]
        found = [row for row in rows if row.e2e_ms >= slower_ms and outcome in ("", row.outcome)]
        found.sort(key=lambda row: row.e2e_ms if order == ListOrder.SLOWEST else row.at_ms, reverse=True)
        return _json(msgspec.json.encode(RecentRequests(found[:limit])))

    async def request(self, request: Request) -> Response:
        """GET /v1/cluster/requests/{id}: the trace of a running or recent request.

        That of a request of another router comes from the state store: 202 as long as it is not there.
        """
        id, tenant, view = request.path_params["id"], visible_tenant(request), self._feed.view
        trace = view.trace(id, tenant) or await self._stored_trace(id, tenant)
        if trace is not None:
            return _json(msgspec.json.encode(trace))
        router = view.router_of(id, tenant)
        if router is None:
            raise RequestNotFound(f"the request {short_repr(id)} is not known to this router", param="id")
        return _json(msgspec.json.encode(PendingTrace(id, router)), status=202)

    async def act(self, request: Request) -> Response:
        """POST /v1/cluster/actions: kills or drains a worker of a demo. Only for the page itself, on this machine."""
        assert self._demo is not None
        refuse_strangers(request)
        body = await read_body(request, MAX_ACTION_BYTES)
        try:
            action = msgspec.json.decode(body, type=DemoCommand)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(str(error)) from None
        await self._demo.act(action)
        return _json(msgspec.json.encode(ActionResult()))


class ClusterStream(Response):
    """Messages in SSE until the viewer leaves, the feed closes or `MAX_VIEW_S` is over."""

    def __init__(self, first: bytes, messages: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._messages = messages

    @classmethod
    async def open(cls, messages: AsyncGenerator[bytes, None]) -> ClusterStream:
        """Takes the first message, so that a refusal is still a status."""
        return cls(await anext(messages), messages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        too_slow: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await cancel_on_disconnect(scope, receive, self._send(send), MAX_VIEW_S, too_slow)
        except Cancelled:
            return
        except DeadlineExceeded:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        async with aclosing(self._messages) as messages:
            headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for message in messages:
                await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def refuse_strangers(request: Request) -> None:
    """Raises `InvalidRequest` unless the router's own page on this machine sent the request.

    Another site's page may reach 127.0.0.1 too, also under a name of its own: it has another origin, or another host.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    is_own = origin is None or origin in (f"http://{host}", f"https://{host}")
    name = host.rsplit(":", 1)[0]
    if not (is_own and name in LOOPBACK and request.headers.get(DEMO_HEADER) == "1" and is_operator(request)):
        raise InvalidRequest(f"only the page of this router, on its own machine, may do this ({DEMO_HEADER}: 1)")


def visible_tenant(request: Request) -> str | None:
    """The tenant whose requests the caller may see; None for all."""
    return None if is_operator(request) else tenant_of(request)


def _number(text: str | None, name: str, default: int, most: int) -> int:
    """A whole number from 0 to `most`. Raises `InvalidRequest`."""
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 12 or int(text) > most:
        raise InvalidRequest(f"{name} must be a whole number up to {most}, not {short_repr(text)}", param=name)
    return int(text)


def _json(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json", headers={"cache-control": "no-store"})
