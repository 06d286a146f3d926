"""`baton drain WORKER_ID`: takes a worker out of service without losing a request, and reports progress.

Finds the worker in the state store and calls it by gRPC; the effect is that of SIGTERM. Safe to repeat. The worker
goes on draining after the command is interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import grpc
from cyclopts import Parameter

from baton.domain.errors import BatonError, LinkBroken, WorkerLost
from baton.domain.ids import WorkerId
from baton.domain.worker import WorkerRecord
from baton.rpc import codec
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import worker_pb2, worker_pb2_grpc
from baton.settings.base import refuse_unknown_variables
from baton.settings.trust import read_trust
from baton.store.connect import connect
from baton.store.store import WorkerRegistry
from services.cli.errors import NotDrained
from services.cli.settings import COMMANDS, DrainSettings


class UnknownWorker(BatonError):
    """No worker with this id is registered."""

    code = "unknown_worker"


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
    trust = read_trust(settings)
    async with contextlib.AsyncExitStack() as stack:
        store = await connect(settings.redis_url)
        stack.push_async_callback(store.close)
        record = await _find_worker(store, id)
        if not trust.verify(record):
            raise LinkBroken(trust.mismatch(record))
        channels = ChannelPool(trust)
        stack.push_async_callback(channels.close)
        try:
            async with asyncio.timeout(settings.wait_s):
                num_left = await _report_progress(channels, record)
                await _wait_until_withdrawn(store, record)
        except TimeoutError:
            raise NotDrained(f"{id} has not left within {settings.wait_s:g} s; it goes on draining") from None
    if num_left:
        raise NotDrained(
            f"{id} has left, but its own drain_timeout_s was over: {num_left} requests had to go elsewhere"
        )
    _print_status(f"{id} has left")
    return 0


async def _find_worker(store: WorkerRegistry, id: WorkerId) -> WorkerRecord:
    """The worker's record. Raises `UnknownWorker`, which lists the registered ones."""
    workers = {worker.id: worker for worker in await store.workers()}
    if id not in workers:
        raise UnknownWorker(f"no worker {id!r} is announced. There are: {', '.join(workers) or 'none'}.")
    return workers[id]


async def _report_progress(channels: ChannelPool, record: WorkerRecord) -> int:
    """Starts the drain and prints progress to its end. Returns the number of requests that were given up."""
    num_left: int | None = None
    try:
        async for progress in _drain_progress(channels, record):
            if progress.num_requests != num_left:
                _print_status(f"{record.id} is draining, requests left: {progress.num_requests}")
            num_left = progress.num_requests
    except grpc.aio.AioRpcError as error:
        if num_left is None:
            why = codec.error_from_rpc(error).log_text
            raise WorkerLost(f"{record.id} cannot be reached at {record.address}: {why}") from None
    return num_left or 0


async def _drain_progress(channels: ChannelPool, record: WorkerRecord) -> AsyncIterator[worker_pb2.DrainProgress]:
    stub = worker_pb2_grpc.WorkerStub(channels.get(record.address, record.incarnation))
    async for progress in stub.Drain(worker_pb2.DrainRequest(incarnation=record.incarnation)):
        yield progress


async def _wait_until_withdrawn(store: WorkerRegistry, record: WorkerRecord) -> None:
    async for _ in store.changes():
        if all(worker.incarnation != record.incarnation for worker in await store.workers()):
            return


def _print_status(line: str) -> None:
    print(line, file=sys.stderr)
