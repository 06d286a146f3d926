"""The worker's `Drain` call: what SIGTERM does, over the network, with a report. Added to both workers' servers.

Lives in the asyncio loop. Knows no role: how many requests are left is a number that the worker gives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import grpc

from baton.domain.errors import WorkerLost
from baton.domain.ids import Incarnation
from baton.rpc import codec
from baton.rpc.gen import worker_pb2, worker_pb2_grpc
from baton.telemetry.logs import get_logger
from baton.worker.lifecycle import WorkerLifecycle

log = get_logger()

REPORT_INTERVAL_S = 0.5


class DrainServicer(worker_pb2_grpc.WorkerServicer):
    """Serves operators. One report a stream; any number may follow the same drain."""

    def __init__(self, incarnation: Incarnation, lifecycle: WorkerLifecycle, num_requests: Callable[[], int]) -> None:
        self._incarnation = incarnation
        self._lifecycle = lifecycle
        self._num_requests = num_requests

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[worker_pb2.DrainProgress, None]:
        """See worker.proto."""
        if request.incarnation != self._incarnation:
            await codec.abort(context, WorkerLost("the process that is meant has restarted"))
        log.info("drain_requested", peer=context.peer())
        self._lifecycle.stop()
        drained = self._lifecycle.drained
        while not drained.is_set():
            yield worker_pb2.DrainProgress(num_requests=self._num_requests())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(drained.wait(), REPORT_INTERVAL_S)
        yield worker_pb2.DrainProgress(num_requests=self._num_requests(), ended=True)
