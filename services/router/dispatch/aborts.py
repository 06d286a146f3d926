"""Sends aborts of attempts to workers without waiting for them. Used by `reserve` and `attempt`, closed by `app`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from baton.domain.ids import AttemptId
from baton.domain.worker import WorkerRecord
from baton.rpc.codec import encode_id
from baton.rpc.gen.common_pb2 import AbortRequest
from baton.rpc.request_metadata import request_metadata
from baton.services.router.dispatch.sessions.session_or_call import send_abort
from baton.services.router.dispatch.workers import WorkerSet
from baton.telemetry.logs import get_logger

ABORT_TIMEOUT_S = 2.0

log = get_logger(__name__)


class Aborts:
    """Aborts in flight. Owned by one event loop."""

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        self._in_progress: set[asyncio.Task[None]] = set()

    def send(self, id: AttemptId, worker: WorkerRecord, reason: str) -> None:
        """Starts to send an abort to `worker` and returns. An unreachable worker ends it at its deadline.

        It follows what was opened in the worker's session. Without a session, or when that has ended, it is a call.
        """
        request = AbortRequest(id=encode_id(id), reason=reason)
        call = send_abort(self._workers, worker, request, ABORT_TIMEOUT_S, request_metadata(id))
        if call is None:
            return
        task = asyncio.create_task(self._wait_for(call, id, worker), name=f"abort-{id}")
        self._in_progress.add(task)
        task.add_done_callback(self._in_progress.discard)

    async def close(self) -> None:
        """Waits for the aborts in flight, for at most `ABORT_TIMEOUT_S`."""
        await asyncio.gather(*self._in_progress, return_exceptions=True)

    async def _wait_for(self, call: Callable[[], Awaitable[None]], id: AttemptId, worker: WorkerRecord) -> None:
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            log.info(
                "abort_undelivered",
                request_id=id.request_id,
                attempt=id.attempt,
                worker=worker.id,
                status=error.code().name,
            )
