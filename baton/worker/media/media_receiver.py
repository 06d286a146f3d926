"""Receives the files of images: checks, decodes and counts them, and gives their tensors to the engine.

Runs in the asyncio loop. Every bound is checked before the bytes that would pass it are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from baton.domain.errors import InvalidRequest, LinkBroken, Overloaded
from baton.domain.media.identity import MediaHasher
from baton.domain.media.span import IDENTITY_BYTES, MediaGrid
from baton.engine.media.store import HeldMedia, MediaKey
from baton.engine.reply import Reply
from baton.model.vision.image_processor import ImageProcessor, PreparedImage
from baton.rpc.channel import send_go_ahead
from baton.rpc.gen import prefill_pb2 as pb
from baton.rpc.media_upload import MAX_PART_BYTES
from baton.telemetry import metrics
from baton.worker.media.image_decoder import ImageDecoder, UnreadableMedia
from baton.worker.request_validator import MAX_NAME_CHARS, clamp_duration

MAX_FILE_BYTES = 10 * 1024 * 1024
ENGINE_TIMEOUT_S = 30.0
RETRY_S = 0.5
MAX_UPLOAD_S = 60.0


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """`max_open_bytes`: of the files of all calls that are open. `max_rows`: of one image."""

    max_file_bytes: int
    max_rows: int
    max_open_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FindMedia:
    """Asks the engine for the rows and grid of a held image; the answer is None if it holds none."""

    key: MediaKey
    reply: Reply[tuple[int, MediaGrid | None] | None]


@dataclass(frozen=True, slots=True)
class HoldMedia:
    """Gives the engine an image. The answer is False if it has no room."""

    key: MediaKey
    item: HeldMedia[Any, Any]
    reply: Reply[bool]


MediaCommand = FindMedia | HoldMedia


class _Outcome(Exception):
    def __init__(self, outcome: pb.MediaOutcome, message: str, num_rows: int = 0) -> None:
        super().__init__(message)
        self.outcome, self.message, self.num_rows = outcome, message, num_rows


class MediaReceiver:
    """`digest`: of `processor`, as in the worker's record. `row_bytes`: of one row of an embedding."""

    def __init__(
        self,
        processor: ImageProcessor,
        digest: str,
        row_bytes: int,
        decoder: ImageDecoder,
        limits: MediaLimits,
        send: Callable[[MediaCommand], bool],
    ) -> None:
        """`send` gives a command to the engine; False if it takes none now."""
        self._processor = processor
        self._digest = digest
        self._row_bytes = row_bytes
        self._decoder = decoder
        self._limits = limits
        self._send = send
        self._open_bytes = 0

    async def receive(self, requests: AsyncIterator[pb.PutMediaRequest], context: Any) -> pb.PutMediaResponse:
        """Serves one call. Raises `BatonError` for a call without an outcome."""
        try:
            async with asyncio.timeout(MAX_UPLOAD_S):
                response = await self._receive(requests, context)
        except TimeoutError:
            raise LinkBroken("the file did not arrive in time") from None
        except _Outcome as ended:
            response = pb.PutMediaResponse(outcome=ended.outcome, message=ended.message, num_rows=ended.num_rows)
        name = pb.MediaOutcome.Name(response.outcome)
        metrics.MEDIA_TOTAL.labels(name.removeprefix("MEDIA_OUTCOME_").lower()).inc()
        return response

    async def _receive(self, requests: AsyncIterator[pb.PutMediaRequest], context: Any) -> pb.PutMediaResponse:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "header":
            raise LinkBroken("a file begins with its header")
        header = first.header
        self._check_header(header)
        key = (header.salt, header.identity)
        found = await self._ask(lambda reply: FindMedia(key, reply))
        if found is not None:
            return _held(header, *found)
        if self._open_bytes + header.num_bytes > self._limits.max_open_bytes:
            raise Overloaded("too many bytes of images arrive here at once", retry_after_s=RETRY_S)
        self._open_bytes += header.num_bytes
        try:
            await send_go_ahead(context)
            prepared = await self._prepare(header, await self._read(header, requests))
        finally:
            self._open_bytes -= header.num_bytes
        item: HeldMedia[Any, Any] = HeldMedia(
            prepared.inputs, prepared.num_rows, prepared.grid, prepared.num_bytes, prepared.num_rows * self._row_bytes
        )
        response = _held(header, prepared.num_rows, prepared.grid)
        if not await self._ask(lambda reply: HoldMedia(key, item, reply)):
            raise Overloaded("images that are in use leave no room for this one", retry_after_s=RETRY_S)
        return response

    def _check_header(self, header: pb.MediaHeader) -> None:
        if len(header.identity) != IDENTITY_BYTES or len(header.salt) > MAX_NAME_CHARS:
            raise InvalidRequest("an image has an identity of 16 bytes, and a short salt", param="media")
        clamp_duration(header.deadline_s, "deadline_s")
        if header.processor != self._digest:
            message = "the image processor of this worker is another one than the router's"
            raise _Outcome(pb.MEDIA_OUTCOME_OTHER_PROCESSOR, message)
        if header.num_bytes > self._limits.max_file_bytes:
            message = f"has {header.num_bytes} bytes; {self._limits.max_file_bytes} are the most"
            raise _Outcome(pb.MEDIA_OUTCOME_TOO_LARGE, message)
        if header.num_rows > self._limits.max_rows:
            message = f"takes {header.num_rows} tokens; {self._limits.max_rows} are the most"
            raise _Outcome(pb.MEDIA_OUTCOME_TOO_LARGE, message)

    async def _read(self, header: pb.MediaHeader, requests: AsyncIterator[pb.PutMediaRequest]) -> bytes:
        """The file. Raises `LinkBroken` if it is not the announced one."""
        data, hasher = bytearray(), MediaHasher(header.processor, header.detail)
        async for request in requests:
            part = request.data
            if request.WhichOneof("part") != "data" or len(part) > MAX_PART_BYTES:
                raise LinkBroken("a file comes in parts of at most 1 MiB")
            if len(data) + len(part) > header.num_bytes:
                raise LinkBroken("the file is longer than announced")
            data += part
            hasher.update(part)
        if len(data) != header.num_bytes or hasher.identity() != header.identity:
            raise LinkBroken("the file is not the one that was announced")
        return bytes(data)

    async def _prepare(self, header: pb.MediaHeader, data: bytes) -> PreparedImage:
        try:
            image = await self._decoder.decode(data)
            prepared = await asyncio.to_thread(
                self._processor.prepare, image.width, image.height, image.pixels, header.detail
            )
        except UnreadableMedia as error:
            raise _Outcome(pb.MEDIA_OUTCOME_UNREADABLE, str(error)) from None
        except ValueError:
            raise _Outcome(pb.MEDIA_OUTCOME_UNREADABLE, "is not one that the image processor takes") from None
        if prepared.num_rows > self._limits.max_rows:
            message = f"takes {prepared.num_rows} tokens; {self._limits.max_rows} are the most"
            raise _Outcome(pb.MEDIA_OUTCOME_TOO_LARGE, message, prepared.num_rows)
        _check_count(header, prepared.num_rows, prepared.grid)
        return prepared

    async def _ask(self, make: Callable[[Reply[Any]], MediaCommand]) -> Any:
        reply: Reply[Any] = Reply()
        if not self._send(make(reply)):
            raise Overloaded("this prefill worker's mailbox is full", retry_after_s=RETRY_S)
        return await reply.wait(ENGINE_TIMEOUT_S)


def _check_count(header: pb.MediaHeader, num_rows: int, grid: MediaGrid | None) -> None:
    """Raises `_Outcome` where the router has counted otherwise."""
    sides = (0, 0) if grid is None else (grid.height, grid.width)
    if (header.num_rows, header.grid_height, header.grid_width) != (num_rows, *sides):
        message = f"takes {num_rows} tokens here, {header.num_rows} in the router"
        raise _Outcome(pb.MEDIA_OUTCOME_COUNT_DIFFERS, message, num_rows)


def _held(header: pb.MediaHeader, num_rows: int, grid: MediaGrid | None) -> pb.PutMediaResponse:
    _check_count(header, num_rows, grid)
    height, width = (0, 0) if grid is None else (grid.height, grid.width)
    return pb.PutMediaResponse(outcome=pb.MEDIA_OUTCOME_HELD, num_rows=num_rows, grid_height=height, grid_width=width)
