"""Pulls embeddings from encode workers: a prefill worker's side of `Encode.PullEmbedding`. Runs in the asyncio loop.

The bytes come by the call's stream, or by NIXL from pages that it names (`embedding_reader`), and are compared with the
digests that were made with them. What differs, is late or does not fit is not used: the router is told, and has the
image encoded elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import BatonError
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.media.span import MediaGrid
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.engine.media.embedding_format import EmbeddingFormat
from baton.engine.media.exported_embedding import PART_BYTES, part_digests
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.kv.page_tags import PageTag
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.codec import error_from_rpc
from baton.rpc.gen import encode_pb2, prefill_pb2
from baton.rpc.gen.encode_pb2_grpc import EncodeStub
from baton.store.store import WorkerRegistry
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.transfer import stream
from baton.transfer.digest import page_digest
from baton.worker.media.embedding_pages import page_identities
from baton.worker.media.embedding_reader import EmbeddingReader, ReadFailed

COMMIT_S = 2.0
"""Longest call that tells a source that its pages were read."""

log = get_logger()


class EmbeddingLost(Exception):
    """The embedding cannot be had from the encode worker that was named. The message says why."""


@dataclass(frozen=True, slots=True)
class PulledEmbedding:
    """An embedding whose parts all had their digests, which it keeps."""

    embedding: SettledEmbedding
    num_rows: int
    grid: MediaGrid | None


class EncoderRegistry:
    """The encode workers in the registry, by process. Addresses come from signed records only."""

    def __init__(self, registry: WorkerRegistry, trust: ClusterTrust) -> None:
        self._registry = registry
        self._trust = trust
        self._known: dict[Incarnation, WorkerRecord] = {}

    async def find(self, id: WorkerId, incarnation: Incarnation) -> WorkerRecord:
        """The record of exactly this process. Reads the registry for one that is not known. Raises `EmbeddingLost`."""
        if incarnation not in self._known:
            try:
                records = await self._registry.workers()
            except BatonError as error:
                raise EmbeddingLost(f"the registry cannot be read: {error}") from None
            encoders = [one for one in records if one.role is WorkerRole.ENCODE and self._trust.verify(one)]
            self._known = {one.incarnation: one for one in encoders}
        record = self._known.get(incarnation)
        if record is None or record.id != id:
            raise EmbeddingLost(f"no encode worker {id[:80]!r} of this incarnation is announced")
        return record

    @property
    def incarnations(self) -> Collection[Incarnation]:
        """Processes that were announced when the registry was last read."""
        return self._known.keys()


class EmbeddingPuller:
    """`fingerprint`: of the embeddings that this worker can use, which are of `format`. They go to `device`.

    `reader` None: they come by the stream only.
    """

    reader: EmbeddingReader | None = None

    def __init__(
        self,
        encoders: EncoderRegistry,
        channels: ChannelPool,
        format: EmbeddingFormat,
        fingerprint: str,
        device: torch.device,
    ) -> None:
        self._encoders = encoders
        self._channels = channels
        self._format = format
        self._fingerprint = fingerprint
        self._device = device
        self._commits: set[asyncio.Task[None]] = set()

    async def pull(
        self, header: prefill_pb2.MediaHeader, timeout_s: float, take_room: Callable[[], None]
    ) -> PulledEmbedding:
        """The embedding of the image of `header` from its source. Raises `EmbeddingLost`.

        Calls `take_room` once, when it is encoded, before its bytes are read; what that raises ends the pull. Bytes
        that NIXL does not read right are asked for by the stream.
        """
        source = header.source
        record = await self._encoders.find(WorkerId(source.worker_id), Incarnation(source.incarnation))
        room, end = _RoomCharge(take_room), asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(end):
                try:
                    return await self._call(record, header, timeout_s, room, by_nixl=True)
                except ReadFailed as error:
                    log.warning("embedding_not_read", source=record.id, why=str(error)[:200])
                left_s = end - asyncio.get_running_loop().time()
                return await self._call(record, header, left_s, room, by_nixl=False)
        except grpc.aio.AioRpcError as error:
            raise EmbeddingLost(f"{record.id}: {error_from_rpc(error).log_text}") from None
        except TimeoutError:
            raise EmbeddingLost(f"{record.id} did not give the embedding in time") from None

    async def _call(
        self,
        record: WorkerRecord,
        header: prefill_pb2.MediaHeader,
        timeout_s: float,
        room: _RoomCharge,
        *,
        by_nixl: bool,
    ) -> PulledEmbedding:
        """Raises `ReadFailed` where NIXL was to read the bytes and has not."""
        reader = self.reader
        request = encode_pb2.PullEmbeddingRequest(
            incarnation=record.incarnation,
            identity=header.identity,
            salt=header.salt,
            fingerprint=self._fingerprint,
            deadline_s=timeout_s,
            wants_source=reader is not None and reader.wants_source(record),
            is_linked=by_nixl and reader is not None and reader.is_linked(record),
        )
        stub = self._channels.stub(EncodeStub, record.address, record.incarnation)
        call, is_read = stub.PullEmbedding(request, timeout=timeout_s), False
        end = asyncio.get_running_loop().time() + timeout_s
        try:
            found = self._checked_header(header, await anext(aiter(call), None))
            if reader is not None and found.HasField("source"):
                reader.link_soon(record, found.source, self._encoders.incarnations)
            room.take()
            if found.pages and request.is_linked and reader is not None:
                data = await self._read(reader, record, header, found, end - asyncio.get_running_loop().time())
                is_read = found.pull != 0
            else:
                data = await _receive(call, found)
        finally:
            if is_read:
                self._commit_soon(stub, record, found.pull, call)
            else:
                call.cancel()
        try:
            embedding = await asyncio.to_thread(
                self._format.from_bytes, data, found.digests, found.num_rows, self._device
            )
        except (RuntimeError, ValueError, MemoryError) as error:  # of torch, as on a device without memory
            raise EmbeddingLost(f"no tensor can be made of it: {repr(error)[:200]}") from None
        grid = MediaGrid(found.grid_height, found.grid_width) if found.grid_height else None
        return PulledEmbedding(embedding, found.num_rows, grid)

    def _commit_soon(self, stub: EncodeStub, record: WorkerRecord, pull: int, call: Any) -> None:
        """Tells the source that its pages were read, and ends the call. The image does not wait for it."""

        async def commit() -> None:
            request = encode_pb2.CommitPullRequest(incarnation=record.incarnation, pull=pull)
            try:
                await stub.CommitPull(request, timeout=COMMIT_S)
            except grpc.aio.AioRpcError as error:  # the source counts a pull that failed
                log.info("embedding_not_committed", source=record.id, why=error_from_rpc(error).log_text)
            except grpc.aio.UsageError:
                log.info("embedding_not_committed", source=record.id, why="the channel was closed")
            finally:
                call.cancel()

        task = asyncio.create_task(commit(), name="commit-pull")
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)

    def _checked_header(
        self, header: prefill_pb2.MediaHeader, first: encode_pb2.EmbeddingPart | None
    ) -> encode_pb2.EmbeddingHeader:
        """The header of an embedding of this shape. Raises `EmbeddingLost`."""
        if first is None or first.WhichOneof("part") != "header":
            raise EmbeddingLost("an embedding begins with its header")
        found = first.header
        num_bytes = header.num_rows * self._format.row_bytes
        num_parts = ceil_div(num_bytes, PART_BYTES)
        if (found.num_rows, found.num_bytes, len(found.digests)) != (header.num_rows, num_bytes, num_parts):
            raise EmbeddingLost(f"it has {found.num_rows} rows in {found.num_bytes} bytes there")
        if (found.grid_height, found.grid_width) != (header.grid_height, header.grid_width):
            raise EmbeddingLost(f"its grid is {found.grid_height} by {found.grid_width} there")
        return found

    async def _read(
        self,
        reader: EmbeddingReader,
        record: WorkerRecord,
        header: prefill_pb2.MediaHeader,
        found: encode_pb2.EmbeddingHeader,
        timeout_s: float,
    ) -> bytearray:
        """The bytes in the pages that `found` names. Raises `ReadFailed`."""
        tags: list[PageTag] | None = None
        if self._channels.trust.secret is not None:  # these bytes travel in clear
            names = page_identities(header.identity, self._fingerprint, len(found.pages))
            if len(found.tags) != len(names):
                raise ReadFailed("its pages have no tags")
            tags = [PageTag(name, tag) for name, tag in zip(names, found.tags, strict=True)]
        data = await reader.read(record, found.pages, tags, found.num_bytes, timeout_s)
        metrics.EMBEDDING_BYTES_TOTAL.labels(reader.transport).inc(len(data))
        if part_digests(data) != tuple(found.digests):
            metrics.INTEGRITY_FAILURES_TOTAL.labels("embedding").inc()
            raise ReadFailed("it differs from its digests")
        return data


class _RoomCharge:
    """Takes room for a pull's bytes once, however often they are asked for."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self._is_taken = False

    def take(self) -> None:
        if not self._is_taken:
            self._take()
            self._is_taken = True


async def _receive(
    call: grpc.aio.UnaryStreamCall[encode_pb2.PullEmbeddingRequest, encode_pb2.EmbeddingPart],
    found: encode_pb2.EmbeddingHeader,
) -> bytearray:
    """The bytes that follow a header. Raises `EmbeddingLost`."""
    data = bytearray()
    async for part in call:
        data += _checked(part, found.digests, len(data), found.num_bytes)
    if len(data) != found.num_bytes:
        raise EmbeddingLost("the embedding was cut short")
    metrics.EMBEDDING_BYTES_TOTAL.labels(stream.TRANSPORT).inc(len(data))
    return data


def _checked(part: encode_pb2.EmbeddingPart, digests: Sequence[int], at: int, num_bytes: int) -> bytes:
    """The bytes of a part that begins at byte `at`. Raises `EmbeddingLost` if they are not those that were digested."""
    if part.WhichOneof("part") != "data" or len(part.data) != min(PART_BYTES, num_bytes - at) or at >= num_bytes:
        raise EmbeddingLost("a part has another length than announced")
    if page_digest(memoryview(part.data)) != digests[at // PART_BYTES]:
        metrics.INTEGRITY_FAILURES_TOTAL.labels("embedding").inc()
        raise EmbeddingLost("a part differs from its digest")
    return part.data
