"""Telling workers that an attempt is over, without waiting for them. Used by `booking` and `attempt`, closed by `app`.

Every message has a deadline, none is lost track of: `close` waits for those under way.
"""

from __future__ import annotations

import asyncio

import grpc

from baton.domain.ids import AttemptId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.codec import encode_id
from baton.rpc.gen.common_pb2 import AbortRequest
from baton.telemetry.logs import get_logger
from services.router.dispatch.fleet import Fleet

ABORT_TIMEOUT_S = 2.0

log = get_logger(__name__)


class Aborts:
    """Abort messages under way. Owned by one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._under_way: set[asyncio.Task[None]] = set()

    def send(self, id: AttemptId, worker: WorkerRecord, reason: str) -> None:
        """Tells `worker` to forget the attempt; returns at once. A worker that cannot be reached ends it by itself."""
        task = asyncio.create_task(self._send(id, worker, reason), name=f"abort-{id}")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Waits for the messages under way; each has its deadline."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _send(self, id: AttemptId, worker: WorkerRecord, reason: str) -> None:
        prefill = worker.role is WorkerRole.PREFILL
        stub = self._fleet.prefill_stub(worker) if prefill else self._fleet.decode_stub(worker)
        request = AbortRequest(id=encode_id(id), reason=reason)
        try:
            await stub.Abort(request, timeout=ABORT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("abort_not_delivered", request_id=id.request_id, worker=worker.id, status=error.code().name)
