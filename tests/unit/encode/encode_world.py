"""An encode worker in this process, with its engine thread and gRPC server, and a puller of its embeddings.

Its tower adds; its images are one tensor each. So a test knows every embedding.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.media.identity import media_identity
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.engine.mailbox import Mailbox
from baton.engine.media.embedding_format import EmbeddingFormat
from baton.engine.media.encoder import MediaEncoder
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.store import MediaStore
from baton.engine.thread import EngineThread
from baton.model.vision.embedding import MediaEmbedding
from baton.model.vision.image_processor import PreparedImage
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import encode_pb2, encode_pb2_grpc, prefill_pb2
from baton.rpc.gen.encode_pb2_grpc import EncodeStub
from baton.rpc.media_upload import put_media
from baton.rpc.server import RunningServer, ServerAuth, start_server
from baton.services.encode.commands import EncodeCommand
from baton.services.encode.embedding_exports import EmbeddingExports
from baton.services.encode.loop import EncodeLoop
from baton.services.encode.scheduler import EncodeScheduler
from baton.services.encode.server import EncodeServicer
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.worker.media.embedding_puller import EmbeddingPuller, EncoderRegistry
from baton.worker.media.embedding_reader import EmbeddingReader
from baton.worker.media.image_decoder import RgbImage
from baton.worker.media.media_receiver import MediaReceiver, media_limits

NUM_ROWS = 5
FORMAT = EmbeddingFormat(hidden=3, depth=1, dtype="float32")
WIDE = EmbeddingFormat(hidden=75_000, depth=1, dtype="float32")
"""An embedding of three parts."""
PROCESSOR, FINGERPRINT = "p" * 32, "f" * 32
INCARNATION = Incarnation(77)
TIMEOUT_S = 20.0


class AddingTower:
    """Row i of an image is its tensor's sum plus i; its DeepStack row is the negative. Waits for `may_go_on`."""

    def __init__(self, format: EmbeddingFormat) -> None:
        self._format = format
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.begun = threading.Event()
        self.fails = False
        self.num_images = 0

    def encode(self, inputs: Mapping[str, torch.Tensor], num_rows: Sequence[int]) -> list[MediaEmbedding]:
        self.begun.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        if self.fails:
            raise RuntimeError("no memory")
        self.num_images += 1
        return [embedding_of(float(inputs["pixels"].sum()), self._format)]


def embedding_of(value: float, format: EmbeddingFormat = FORMAT) -> MediaEmbedding:
    rows = (value + torch.arange(NUM_ROWS, dtype=torch.float32))[:, None].expand(NUM_ROWS, format.hidden).contiguous()
    return MediaEmbedding(rows, (-rows,))


class _Decoder:
    async def decode(self, data: bytes) -> RgbImage:
        return RgbImage(len(data), 1, data * 3)


class _Processor:
    def prepare(self, width: int, height: int, pixels: bytes, detail: str = "") -> PreparedImage:
        return PreparedImage({"pixels": torch.tensor([float(sum(pixels))])}, NUM_ROWS, None)


def value_of(data: bytes) -> float:
    """What `AddingTower` makes of the file `data`."""
    return float(sum(data * 3))


def header(data: bytes, salt: str = "s", source: Incarnation | None = None) -> prefill_pb2.MediaHeader:
    made = prefill_pb2.MediaHeader(
        identity=media_identity(data, PROCESSOR), num_bytes=len(data), salt=salt, processor=PROCESSOR,
        num_rows=NUM_ROWS, deadline_s=TIMEOUT_S,
    )  # fmt: skip
    if source is not None:
        made.source.worker_id, made.source.incarnation = "encode-0", source
    return made


class _SlowServicer(EncodeServicer):
    """Calls `on_part` behind each message of an embedding."""

    on_part: Callable[[encode_pb2.EmbeddingPart], Awaitable[None]] | None = None

    async def PullEmbedding(self, request: Any, context: Any) -> AsyncGenerator[encode_pb2.EmbeddingPart, None]:
        async with aclosing(super().PullEmbedding(request, context)) as parts:
            async for part in parts:
                yield part
                if self.on_part is not None:
                    await self.on_part(part)


@dataclass
class EncodeWorld:
    """`encoder` takes calls. `store`: the encode worker's; `registry` has its record."""

    encoder: EncodeStub
    tower: AddingTower
    store: MediaStore[Any, ExportedEmbedding]
    registry: MemoryStore
    record: WorkerRecord
    channels: ChannelPool
    loop: EncodeLoop
    server: RunningServer
    servicer: _SlowServicer

    async def put(self, data: bytes, salt: str = "s") -> prefill_pb2.PutMediaResponse:
        return await put_media(self.encoder, header(data, salt), data, TIMEOUT_S)

    def nixl_puller(self, format: EmbeddingFormat = FORMAT) -> tuple[EmbeddingPuller, EmbeddingReader]:
        """A puller that links, and its reader, which the caller closes. Has the worker export over NIXL."""
        if self.servicer.exports is None:
            trust = self.channels.trust
            self.servicer.exports = EmbeddingExports(self.record.id, self.record.incarnation, FINGERPRINT, trust)
        puller = self.puller(format)
        puller.reader = reader = EmbeddingReader(WorkerId("prefill-0"), Incarnation(5), self.channels.trust)
        return puller, reader

    def puller(self, format: EmbeddingFormat = FORMAT, fingerprint: str = FINGERPRINT) -> EmbeddingPuller:
        encoders = EncoderRegistry(self.registry, self.channels.trust)
        return EmbeddingPuller(encoders, self.channels, format, fingerprint, torch.device("cpu"))


@asynccontextmanager
async def encode_world(
    format: EmbeddingFormat = FORMAT, trust: ClusterTrust = OPEN_CLUSTER, max_bytes: int = 1 << 24
) -> AsyncIterator[EncodeWorld]:
    mailbox: Mailbox[EncodeCommand] = Mailbox(64)
    tower, store = AddingTower(format), MediaStore[Any, ExportedEmbedding](max_bytes)
    encoder = MediaEncoder(tower, store, format.to_bytes)  # type: ignore[arg-type]
    loop = EncodeLoop(mailbox, EncodeScheduler(store, 2 * NUM_ROWS), encoder, lambda: None)
    crashes: list[BaseException] = []
    thread = EngineThread(loop, "encode", crashes.append)
    limits = media_limits(100, 10, max_bytes)
    receiver = MediaReceiver(_Processor(), PROCESSOR, format.row_bytes, _Decoder(), limits, mailbox.try_put)  # type: ignore[arg-type]
    servicer = _SlowServicer(mailbox, receiver, FINGERPRINT, lambda: False)

    def register(server: grpc.aio.Server) -> None:
        encode_pb2_grpc.add_EncodeServicer_to_server(servicer, server)

    server = await start_server("127.0.0.1", 0, register, ServerAuth(INCARNATION, trust))
    channels = ChannelPool(trust)
    registry = MemoryStore(StoreOptions(worker_ttl_s=3600.0))  # nobody announces again
    address = f"127.0.0.1:{server.port}"
    record = WorkerRecord(WorkerId("encode-0"), WorkerRole.ENCODE, INCARNATION, address, "m", "", 0, 100, 100)
    await registry.announce(record)
    thread.start()
    stub = channels.stub(EncodeStub, address, INCARNATION)
    try:
        yield EncodeWorld(stub, tower, store, registry, record, channels, loop, server, servicer)
        assert not crashes
    finally:
        tower.may_go_on.set()
        await channels.close()
        await server.stop()
        if servicer.exports is not None:
            servicer.exports.stop()
        assert thread.stop(TIMEOUT_S)
