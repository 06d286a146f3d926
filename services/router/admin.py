"""The router's second HTTP port, for its operators: metrics, probes and the cluster, without an API key.

Whoever reaches the port reads figures of all tenants, so it belongs to a network of its own: see docs/security.md. It
changes nothing and shows no text of a request. Built by `app`.
"""

from __future__ import annotations

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.domain.errors import BatonError
from baton.services.router.cluster.feed import ClusterFeed
from baton.services.router.edge.http_errors import NotReady, error_response
from baton.services.router.openai.schemas import Status
from baton.services.router.routes import ReadinessCheck
from baton.telemetry import metrics
from baton.telemetry.series.model_label import ModelRegistry


def make_admin_app(readiness: ReadinessCheck, feed: ClusterFeed, model: str) -> Starlette:
    """`/metrics`, `/health`, `/ready` and `/admin/cluster`. `model`: the name that is served, a label of all series."""
    admin = _AdminEndpoints(readiness, feed, ModelRegistry(metrics.REGISTRY, model))
    app = Starlette(
        routes=[
            Route("/metrics", admin.metrics),
            Route("/health", admin.health),
            Route("/ready", admin.ready),
            Route("/admin/cluster", admin.cluster),
        ],
        exception_handlers={BatonError: _on_error},
    )
    app.router.redirect_slashes = False
    return app


class _AdminEndpoints:
    """The endpoints."""

    def __init__(self, readiness: ReadinessCheck, feed: ClusterFeed, registry: ModelRegistry) -> None:
        self._readiness = readiness
        self._feed = feed
        self._registry = registry

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        content, content_type = metrics.render(request.headers.get("accept", ""), self._registry)
        return Response(content, headers={"content-type": content_type})

    async def health(self, request: Request) -> Response:
        """GET /health: the process runs."""
        return _json(Status("ok"))

    async def ready(self, request: Request) -> Response:
        """GET /ready: requests can be served."""
        ready, detail = self._readiness()
        if not ready:
            raise NotReady(detail)
        return _json(Status("ready", detail))

    async def cluster(self, request: Request) -> Response:
        """GET /admin/cluster: `/v1/cluster` as an operator sees it."""
        return Response(self._feed.snapshot(None), media_type="application/json")


def _json(struct: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(struct), media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error).response()
