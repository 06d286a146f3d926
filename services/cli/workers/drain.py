"""`baton drain WORKER_ID`: takes a worker out of service without losing a request, and reports progress.

Finds the worker in the state store and calls it by gRPC; the effect is that of SIGTERM. Safe to repeat. The worker
goes on draining after the command is interrupted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import grpc
from cyclopts import Parameter

from baton.domain.errors import WorkerLost
from baton.domain.ids import WorkerId
from baton.domain.worker import WorkerRecord
from baton.rpc import codec
from baton.rpc.gen import worker_pb2
from baton.services.cli.errors import NotDrained
from baton.services.cli.settings import COMMANDS, DrainSettings
from baton.services.cli.workers.lookup import FoundWorker, found_worker
from baton.settings.base import refuse_unknown_variables
from baton.store.store import WorkerRegistry


def drain(
    worker_id: Annotated[str, Parameter(help="The worker's name, as it was given with --worker-id.")],
    /,
    *,
    settings: Annotated[DrainSettings | None, Parameter(name="*")] = None,
) -> int:
    """Let a worker finish its requests, accept no new ones, and exit; returns when it has left."""
    refuse_unknown_variables(COMMANDS.values())
    return asyncio.run(_drain(WorkerId(worker_id), settings or DrainSettings()))


async def _drain(id: WorkerId, settings: DrainSettings) -> int:
    async with found_worker(id, settings) as worker:
        try:
            async with asyncio.timeout(settings.wait_s):
                num_left = await _report_progress(worker)
                await _wait_until_withdrawn(worker.store, worker.record)
        except TimeoutError:
            raise NotDrained(f"{id} has not left within {settings.wait_s:g} s; it goes on draining") from None
    if num_left:
        raise NotDrained(
            f"{id} has left, but its own drain_timeout_s was over: {num_left} requests had to go elsewhere"
        )
    _print_status(f"{id} has left")
    return 0


async def _report_progress(worker: FoundWorker) -> int:
    """Starts the drain and prints progress to its end. Returns the number of requests that were given up."""
    record = worker.record
    num_left: int | None = None
    try:
        async for progress in _drain_progress(worker):
            if progress.num_requests != num_left:
                _print_status(f"{record.id} is draining, requests left: {progress.num_requests}")
            num_left = progress.num_requests
    except grpc.aio.AioRpcError as error:
        if num_left is None:
            why = codec.error_from_rpc(error).log_text
            raise WorkerLost(f"{record.id} cannot be reached at {record.address}: {why}") from None
    return num_left or 0


async def _drain_progress(worker: FoundWorker) -> AsyncIterator[worker_pb2.DrainProgress]:
    async for progress in worker.stub.Drain(worker_pb2.DrainRequest(incarnation=worker.record.incarnation)):
        yield progress


async def _wait_until_withdrawn(store: WorkerRegistry, record: WorkerRecord) -> None:
    async for _ in store.changes():
        if all(worker.incarnation != record.incarnation for worker in await store.workers()):
            return


def _print_status(line: str) -> None:
    print(line, file=sys.stderr)
