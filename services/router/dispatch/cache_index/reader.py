"""Reads the cache events of every live worker into the index. One task a worker; owned by the router's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from baton.domain.ids import Incarnation
from baton.domain.worker import WorkerRecord
from baton.kv.events.codec import split_keys
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import worker_pb2
from baton.rpc.gen.worker_pb2_grpc import WorkerStub
from baton.services.router.dispatch.cache_index.index import CacheIndex
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import INDEX_GAP_TOTAL

RETRY_S = 1.0
"""Time before a broken stream is opened again."""

MAX_DELTA_BYTES = 64 * 1024 * 1024
"""Keys of one delta, all parts together: four million pages."""

log = get_logger(__name__)


class CacheEventReader:
    """Follows one worker incarnation. `seq`: the position that the index has its content of; 0: of none."""

    def __init__(self, worker: Incarnation, index: CacheIndex) -> None:
        self.seq = 0
        self._worker = worker
        self._index = index
        self._parts: list[worker_pb2.CacheDelta] = []
        self._num_bytes = 0

    def begin(self) -> worker_pb2.CacheEventsRequest:
        """The request of a new stream. Drops the parts of a delta that never became whole."""
        self._parts, self._num_bytes = [], 0
        if not self.seq:
            self._index.clear(self._worker)
        return worker_pb2.CacheEventsRequest(incarnation=self._worker, from_seq=self.seq)

    def apply(self, message: worker_pb2.CacheDelta) -> bool:
        """Takes a message, and applies a delta once its last part is here.

        False if it does not fit: the stream must begin again, with everything that the worker has. Missed events are
        counted, whether a snapshot makes up for them or not.
        """
        self._parts.append(message)
        self._num_bytes += message.ByteSize()
        if self._num_bytes > MAX_DELTA_BYTES:
            return self._give_up()
        if message.more:
            return True
        self._num_bytes = 0
        parts, self._parts = self._parts, []
        first = parts[0]
        is_gap = first.after_seq != self.seq
        if is_gap and self.seq:
            INDEX_GAP_TOTAL.inc()
        try:
            stored = [key for part in parts for key in split_keys(part.stored)]
            removed = [key for part in parts for key in split_keys(part.removed)]
        except ValueError:
            return self._give_up()
        if is_gap and not first.reset:
            return self._give_up()
        if first.reset:
            self._index.clear(self._worker)
        self._index.update(self._worker, stored, removed)
        self.seq = first.seq
        return True

    def _give_up(self) -> bool:
        self.seq = 0
        return False


class CacheEventReaders:
    """Reads the events of all `workers()`. `refresh` after each change of them, `close` at the end."""

    def __init__(self, workers: Callable[[], Sequence[WorkerRecord]], channels: ChannelPool, index: CacheIndex) -> None:
        self._workers = workers
        self._channels = channels
        self._index = index
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}

    def refresh(self) -> None:
        """Begins to read new workers and stops at lost ones, which the index forgets."""
        records = {record.incarnation: record for record in self._workers()}
        for incarnation in self._tasks.keys() - records.keys():
            self._tasks.pop(incarnation).cancel()
            self._index.forget(incarnation)
        for incarnation, record in records.items():
            if incarnation not in self._tasks:
                self._tasks[incarnation] = asyncio.create_task(self._follow(record), name=f"cache-events-{record.id}")

    async def close(self) -> None:
        """Ends all streams; idempotent."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, record: WorkerRecord) -> None:
        reader = CacheEventReader(record.incarnation, self._index)
        while True:
            try:
                await self._read(record, reader)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # a worker of an older version
                    log.info("cache_events_unsupported", worker=record.id)
                    return
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # The channel was replaced or closed, which cancels its calls.
            await asyncio.sleep(RETRY_S)

    async def _read(self, record: WorkerRecord, reader: CacheEventReader) -> None:
        """Reads one stream to its end."""
        stub = self._channels.stub(WorkerStub, record.address, record.incarnation)
        call = stub.CacheEvents(reader.begin())
        try:
            async for message in call:
                if not reader.apply(message):
                    log.warning("cache_events_out_of_order", worker=record.id)
                    return
        finally:
            call.cancel()
