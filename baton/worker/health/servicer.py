"""The gRPC health protocol (grpc.health.v1) of a worker: whether it takes work now.

Anyone may ask, so a reply tells nothing else. States are read from the worker itself at each question; a watched state
is read again every `WATCH_INTERVAL_S`. Runs in the asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.domain.trust import ClusterTrust
from baton.worker.lifecycle import WorkerLifecycle

WATCH_INTERVAL_S = 0.5
MAX_WATCHERS = 64
HEALTH_SERVICE = "grpc.health.v1.Health"
State = health_pb2.HealthCheckResponse


class WorkerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Answers for the whole worker, whichever service is asked for: `AuthInterceptor` leaves the requests unread.

    SERVING: it does not drain, and `is_linked`, so that it can do what its role is for. Watches end when it is drained.
    """

    def __init__(self, lifecycle: WorkerLifecycle, is_linked: Callable[[], bool] = lambda: True) -> None:
        self._lifecycle = lifecycle
        self._is_linked = is_linked
        self._num_watchers = 0

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthCheckResponse:
        """The state of the worker."""
        return self._state()

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthListResponse:
        """The state of the worker, under the empty name."""
        return health_pb2.HealthListResponse(statuses={"": self._state()})

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The state of the worker, now and after each change. RESOURCE_EXHAUSTED if `MAX_WATCHERS` watch already."""
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch this worker's health")
        self._num_watchers += 1
        drained, sent = self._lifecycle.drained, None
        try:
            while True:
                ended, state = drained.is_set(), self._state()
                if state != sent:
                    yield state
                    sent = state
                if ended:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_INTERVAL_S):
                        await drained.wait()
        finally:
            self._num_watchers -= 1

    def _state(self) -> health_pb2.HealthCheckResponse:
        serves = not self._lifecycle.draining and self._is_linked()
        return State(status=State.SERVING if serves else State.NOT_SERVING)


def add_standard_services(
    server: grpc.aio.Server, health: WorkerHealth, trust: ClusterTrust, services: tuple[str, ...]
) -> None:
    """Adds health checks and, in an open cluster, reflection of `services` (full names).

    With a secret there is no reflection: it is a stream of requests, which can carry no call token.
    """
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if not trust.keys("call-token"):
        reflection.enable_server_reflection((*services, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
