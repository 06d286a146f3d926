"""`baton drain WORKER_ID`: takes a worker out of service without losing a request, and says how far it is.

The worker is found in the reception book and told over gRPC; what it then does is what SIGTERM makes it do. Safe to
repeat, and to give up waiting for: the worker goes on.
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
from baton.rpc.client import Channels
from baton.rpc.gen import worker_pb2, worker_pb2_grpc
from baton.settings.base import refuse_unknown_variables
from baton.settings.trust import read_trust
from baton.state.base import WorkerRegistry
from baton.state.connect import connect
from services.cli.errors import NotDrained
from services.cli.settings import COMMANDS, DrainSettings


class UnknownWorker(BatonError):
    """No worker of that name is announced."""

    code = "unknown_worker"


def drain(
    worker_id: Annotated[str, Parameter(help="The worker's name, as it was given with --worker-id.")],
    /,
    *,
    settings: Annotated[DrainSettings | None, Parameter(name="*")] = None,
) -> int:
    """Let a worker finish what it has, take nothing new, and exit; returns when it has left."""
    refuse_unknown_variables(COMMANDS.values())
    return asyncio.run(_drain(WorkerId(worker_id), settings or DrainSettings()))


async def _drain(id: WorkerId, settings: DrainSettings) -> int:
    trust = read_trust(settings)
    async with contextlib.AsyncExitStack() as stack:
        book = await connect(settings.redis_url)
        stack.push_async_callback(book.close)
        record = await _find(book, id)
        if not trust.vouches(record):
            raise LinkBroken(trust.complaint(record))
        channels = Channels(trust)
        stack.push_async_callback(channels.close)
        try:
            async with asyncio.timeout(settings.wait_s):
                num_left = await _follow(channels, record)
                await _until_gone(book, record)
        except TimeoutError:
            raise NotDrained(f"{id} has not left within {settings.wait_s:g} s; it goes on draining") from None
    if num_left:
        raise NotDrained(
            f"{id} has left, but its own drain_timeout_s was over: {num_left} requests had to go elsewhere"
        )
    _say(f"{id} has left")
    return 0


async def _find(book: WorkerRegistry, id: WorkerId) -> WorkerRecord:
    """Raises `UnknownWorker`, which names those that are there."""
    workers = {worker.id: worker for worker in await book.workers()}
    if id not in workers:
        raise UnknownWorker(f"no worker {id!r} is announced. There are: {', '.join(workers) or 'none'}.")
    return workers[id]


async def _follow(channels: Channels, record: WorkerRecord) -> int:
    """Tells the worker and reports until its drain has ended; how many requests it had to give up."""
    num_left: int | None = None
    try:
        async for progress in _progress(channels, record):
            if progress.num_requests != num_left:
                _say(f"{record.id} is draining, requests left: {progress.num_requests}")
            num_left = progress.num_requests
    except grpc.aio.AioRpcError as error:
        if num_left is None:
            why = codec.error_of(error)
            raise WorkerLost(f"{record.id} cannot be reached at {record.address}: {why}") from None
    return num_left or 0


async def _progress(channels: Channels, record: WorkerRecord) -> AsyncIterator[worker_pb2.DrainProgress]:
    stub = worker_pb2_grpc.WorkerStub(channels.get(record.address, record.incarnation))
    async for progress in stub.Drain(worker_pb2.DrainRequest(incarnation=record.incarnation)):
        yield progress


async def _until_gone(book: WorkerRegistry, record: WorkerRecord) -> None:
    async for _ in book.changes():
        if all(worker.incarnation != record.incarnation for worker in await book.workers()):
            return


def _say(line: str) -> None:
    print(line, file=sys.stderr)
