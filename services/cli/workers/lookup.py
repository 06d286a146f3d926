"""Finds a worker in the state store for a command that calls it. Used by `drain` and `role`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton.domain.errors import BatonError, LinkBroken
from baton.domain.ids import WorkerId
from baton.domain.worker import WorkerRecord
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import worker_pb2_grpc
from baton.services.cli.settings import ClusterClientSettings
from baton.settings.trust import read_trust
from baton.store.connect import connect
from baton.store.store import WorkerRegistry


class UnknownWorker(BatonError):
    """No worker with this id is registered."""

    code = "unknown_worker"


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker's record, the store that has it, and the `Worker` service of its process."""

    record: WorkerRecord
    store: WorkerRegistry
    stub: worker_pb2_grpc.WorkerStub


@contextlib.asynccontextmanager
async def found_worker(id: WorkerId, settings: ClusterClientSettings) -> AsyncIterator[FoundWorker]:
    """Connects to the worker with this id. Raises `UnknownWorker`, or `LinkBroken` for a foreign signature."""
    trust = read_trust(settings)
    async with contextlib.AsyncExitStack() as stack:
        store = await connect(settings.redis_url)
        stack.push_async_callback(store.close)
        record = await _find(store, id)
        if not trust.verify(record):
            raise LinkBroken(trust.mismatch(record))
        channels = ChannelPool(trust)
        stack.push_async_callback(channels.close)
        yield FoundWorker(record, store, worker_pb2_grpc.WorkerStub(channels.get(record.address, record.incarnation)))


async def _find(store: WorkerRegistry, id: WorkerId) -> WorkerRecord:
    workers = {worker.id: worker for worker in await store.workers()}
    if id not in workers:
        raise UnknownWorker(f"no worker {id!r} is announced. There are: {', '.join(workers) or 'none'}.")
    return workers[id]
