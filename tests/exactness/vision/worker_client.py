"""A client of real workers that sends images and spans as a router does, and the picture files that it sends."""

from __future__ import annotations

import asyncio
import io
import random
import uuid
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from PIL import Image

from baton.domain.errors import NeedMedia
from baton.domain.ids import AttemptId, RequestId
from baton.domain.media.identity import media_identity
from baton.domain.media.span import MediaGrid, MediaSpan
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.kv.keys import page_keys
from baton.rpc import codec
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import decode_pb2, prefill_pb2
from baton.rpc.gen.decode_pb2_grpc import DecodeStub
from baton.rpc.gen.prefill_pb2_grpc import PrefillStub
from baton.rpc.media_upload import put_media
from baton.store.connect import connect
from baton.store.store import StateStore
from tests.cluster import Cluster

TIMEOUT_S = 60.0


def picture_file(seed: int, width: int = 112, height: int = 112, format: str = "PNG") -> bytes:
    """A picture of coloured squares."""
    rng, file = random.Random(seed), io.BytesIO()
    colours = [rng.randrange(256) for _ in range(3 * 8 * 8)]
    picture = Image.frombytes("RGB", (8, 8), bytes(colours)).resize((width, height), Image.Resampling.NEAREST)
    picture.save(file, format)
    return file.getvalue()


def make_request(ids: list[int], spans: tuple[MediaSpan, ...], num_tokens: int) -> EngineRequest:
    """A greedy request of a new name."""
    id = AttemptId(RequestId(uuid.uuid4().hex), 1)
    sampling = SamplingParams(temperature=0.0)
    return EngineRequest(id, tuple(ids), len(ids), sampling, StopParams(num_tokens), media=spans)


@dataclass(frozen=True, slots=True)
class SentImage:
    """A file, and how many rows a router counts for it."""

    file: bytes
    num_rows: int
    grid: MediaGrid | None = None
    salt: str = ""

    def header(self, processor: str) -> prefill_pb2.MediaHeader:
        height, width = (0, 0) if self.grid is None else (self.grid.height, self.grid.width)
        return prefill_pb2.MediaHeader(
            identity=media_identity(self.file, processor),
            num_bytes=len(self.file),
            salt=self.salt,
            processor=processor,
            num_rows=self.num_rows,
            grid_height=height,
            grid_width=width,
        )


class WorkerClient:
    """Talks to the prefill and the decode worker of a cluster. An async context manager."""

    def __init__(self, cluster: Cluster, page_size: int) -> None:
        self._redis_url = cluster.redis.url
        self._page_size = page_size
        self.channels = ChannelPool()

    async def __aenter__(self) -> Self:
        self._store: StateStore = await connect(self._redis_url)
        records = {record.role: record for record in await self._store.workers()}
        self.prefill_record: WorkerRecord = records[WorkerRole.PREFILL]
        self.decode_record: WorkerRecord = records[WorkerRole.DECODE]
        self.prefill = self.channels.stub(PrefillStub, self.prefill_record.address, self.prefill_record.incarnation)
        self.decode = self.channels.stub(DecodeStub, self.decode_record.address, self.decode_record.incarnation)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.channels.close()
        await self._store.close()

    def identity(self, image: SentImage) -> bytes:
        return media_identity(image.file, self.prefill_record.processor)

    async def put(self, image: SentImage) -> prefill_pb2.PutMediaResponse:
        """Sends one image."""
        return await put_media(self.prefill, image.header(self.prefill_record.processor), image.file, TIMEOUT_S)

    async def tokens(
        self, ids: list[int], spans: tuple[MediaSpan, ...], images: list[SentImage], num_tokens: int
    ) -> list[int]:
        """The greedy tokens of a prompt. Sends images when the worker asks for them, and tries again."""
        request = make_request(ids, spans, num_tokens)
        while True:
            try:
                return await self.attempt(request)
            except NeedMedia as error:
                for image in images:
                    if self.identity(image) in error.identities:
                        response = await self.put(image)
                        assert response.outcome == prefill_pb2.MEDIA_OUTCOME_HELD, response
                request = replace(request, id=replace(request.id, attempt=request.id.attempt + 1))

    async def attempt(self, request: EngineRequest) -> list[int]:
        """The tokens of one attempt. Raises the error that ends it."""
        keys = page_keys(request.tokens, self._page_size, request.salt, request.media)
        reserve = decode_pb2.ReserveRequest(
            id=codec.encode_id(request.id), num_tokens=len(request.tokens), page_keys=keys, deadline_s=TIMEOUT_S
        )
        reserved = (await self.decode.Reserve(reserve, timeout=TIMEOUT_S)).reserved
        generating = asyncio.create_task(self._generate(request, reserved.reservation_id))
        message = prefill_pb2.PrefillRequest(
            request=codec.encode_request(request), decode_prefix_len=reserved.decode_prefix_len, deadline_s=TIMEOUT_S
        )
        tokens: list[int] = []
        try:
            async for event in self.prefill.Prefill(message, timeout=TIMEOUT_S):
                if event.HasField("failed"):
                    raise codec.decode_failure(event.failed)
                if event.HasField("sealed"):
                    tokens.append(event.sealed.first_token.token)
            return tokens + await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    async def _generate(self, request: EngineRequest, reservation_id: str) -> list[int]:
        message = decode_pb2.GenerateRequest(
            request=codec.encode_request(request),
            reservation_id=reservation_id,
            prefill_id=self.prefill_record.id,
            prefill_incarnation=self.prefill_record.incarnation,
            deadline_s=TIMEOUT_S,
        )
        tokens: list[int] = []
        async for event in self.decode.Generate(message, timeout=TIMEOUT_S):
            if event.HasField("failed"):
                raise codec.decode_failure(event.failed)
            tokens += [token.token for token in event.tokens.tokens]
        return tokens
