"""Receives the files of images: checks, decodes and counts them, and gives their tensors to the engine.

In a prefill worker it also has embeddings pulled, where the router names an encode worker in place of the bytes.

Runs in the asyncio loop. Every bound is checked before the bytes that would pass it are read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from baton.domain.errors import DeadlineExceeded, InvalidRequest, LinkBroken, Overloaded
from baton.domain.media.identity import MediaHasher
from baton.domain.media.span import IDENTITY_BYTES, MediaGrid
from baton.engine.media.store import HeldMedia, MediaKey
from baton.engine.reply import Reply
from baton.model.vision.image_processor import ImageProcessor, PreparedImage
from baton.rpc.channel import send_go_ahead
from baton.rpc.gen import prefill_pb2 as pb
from baton.rpc.media_upload import MAX_PART_BYTES
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.worker.media.embedding_puller import EmbeddingLost, EmbeddingPuller
from baton.worker.media.image_decoder import ImageDecoder, UnreadableMedia
from baton.worker.request_validator import MAX_NAME_CHARS, clamp_duration

MAX_FILE_BYTES = 10 * 1024 * 1024
ENGINE_TIMEOUT_S = 30.0
RETRY_S = 0.5
MAX_UPLOAD_S = 60.0
"""Of a call, if it does not say less."""
MAX_IMAGE_BUDGETS = 16
MAX_DECODING = 2
"""Images that are decoded, prepared or given to the engine at once. Bounds the pixels and tensors of all calls."""

log = get_logger()


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """`max_open_bytes`: of the files of all calls that are open. `max_rows`: of one image.

    `max_held_bytes`: of all images that the engine holds, and so of one.
    """

    max_file_bytes: int
    max_rows: int
    max_held_bytes: int
    max_open_bytes: int = 64 * 1024 * 1024


def media_limits(max_model_len: int, encode_budget: int, max_held_bytes: int) -> MediaLimits:
    """Limits of a worker whose steps encode `encode_budget` rows: one image takes `MAX_IMAGE_BUDGETS` of them at most.

    A step encodes one image whole, and the router takes a step without end for one that hangs.
    """
    max_rows = min(max_model_len, MAX_IMAGE_BUDGETS * max(1, encode_budget))
    return MediaLimits(MAX_FILE_BYTES, max_rows, max_held_bytes)


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


@dataclass(frozen=True, slots=True)
class RoomQuery:
    """Asks the engine whether it could hold an image of so many bytes now."""

    num_bytes: int
    reply: Reply[bool]


MediaCommand = FindMedia | HoldMedia | RoomQuery


class _Outcome(Exception):
    def __init__(self, outcome: pb.MediaOutcome, message: str, num_rows: int = 0) -> None:
        super().__init__(message)
        self.outcome, self.message, self.num_rows = outcome, message, num_rows


class MediaReceiver:
    """`digest`: of `processor`, as in the worker's record. `row_bytes`: of one row of an embedding.

    `puller` None: no embeddings are pulled. `has_tower` False: no files are taken.
    """

    puller: EmbeddingPuller | None = None
    has_tower = True

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
        self._places = asyncio.Semaphore(MAX_DECODING)
        self._tasks: set[asyncio.Task[pb.PutMediaResponse]] = set()

    async def receive(self, requests: AsyncIterator[pb.PutMediaRequest], context: Any) -> pb.PutMediaResponse:
        """Serves one call. Raises `BatonError` for a call without an outcome."""
        try:
            response = await self._receive(requests, context)
        except _Outcome as ended:
            response = pb.PutMediaResponse(outcome=ended.outcome, message=ended.message, num_rows=ended.num_rows)
        name = pb.MediaOutcome.Name(response.outcome)
        metrics.MEDIA_TOTAL.labels(name.removeprefix("MEDIA_OUTCOME_").lower()).inc()
        return response

    async def _receive(self, requests: AsyncIterator[pb.PutMediaRequest], context: Any) -> pb.PutMediaResponse:
        begun_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(begun_at + MAX_UPLOAD_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise LinkBroken("the header did not arrive in time") from None
        if first is None or first.WhichOneof("part") != "header":
            raise LinkBroken("a file begins with its header")
        header = first.header
        self._check_header(header)
        key = (header.salt, header.identity)
        found = await self._ask(lambda reply: FindMedia(key, reply))
        if found is not None:
            return _held(header, *found)
        end = begun_at + min(MAX_UPLOAD_S, clamp_duration(header.deadline_s, "deadline_s") or MAX_UPLOAD_S)
        if header.HasField("source"):
            return await self._pull_until(end, header)
        if not self.has_tower:
            raise _Outcome(pb.MEDIA_OUTCOME_NO_TOWER, "is not encoded by this worker")
        if self._open_bytes + header.num_bytes > self._limits.max_open_bytes:
            raise Overloaded("too many bytes of images arrive here at once", retry_after_s=RETRY_S)
        async with contextlib.AsyncExitStack() as charge:
            self._open_bytes += header.num_bytes
            charge.callback(self._release, header.num_bytes)
            data = await self._read_until(end, header, requests, context)
            return await self._work_until(end, header, data, charge)

    def _release(self, num_bytes: int) -> None:
        self._open_bytes -= num_bytes

    async def _pull_until(self, end: float, header: pb.MediaHeader) -> pb.PutMediaResponse:
        """Holds the embedding that an encode worker has."""
        num_bytes = header.num_rows * self._row_bytes
        if num_bytes > self._limits.max_held_bytes:
            message = f"takes {num_bytes} bytes in this worker, which holds {self._limits.max_held_bytes}"
            raise _Outcome(pb.MEDIA_OUTCOME_TOO_LARGE, message)
        if not await self._ask(lambda reply: RoomQuery(num_bytes, reply)):  # before an encode worker works for nothing
            raise _no_room()
        with contextlib.ExitStack() as charge:

            def take_room() -> None:  # not before: pulls that wait for an encode worker have no bytes
                if self._open_bytes and self._open_bytes + num_bytes > self._limits.max_open_bytes:
                    raise Overloaded("too many bytes of images arrive here at once", retry_after_s=RETRY_S)
                self._open_bytes += num_bytes
                charge.callback(self._release, num_bytes)

            try:
                if self.puller is None:
                    raise EmbeddingLost("this worker pulls no embeddings")
                pulled = await self.puller.pull(header, end - asyncio.get_running_loop().time(), take_room)
            except EmbeddingLost as error:
                log.warning("embedding_not_pulled", source=header.source.worker_id, why=str(error)[:200])
                raise _Outcome(pb.MEDIA_OUTCOME_SOURCE_LOST, "is not held by the encode worker") from None
            metrics.MEDIA_TOTAL.labels("pulled").inc()
            item: HeldMedia[Any, Any] = HeldMedia(None, pulled.num_rows, pulled.grid, 0, num_bytes, pulled.embedding)
            return await self._give(header, item)

    async def _read_until(
        self, end: float, header: pb.MediaHeader, requests: AsyncIterator[pb.PutMediaRequest], context: Any
    ) -> bytes:
        try:
            async with asyncio.timeout_at(end):
                await send_go_ahead(context)
                return await self._read(header, requests)
        except TimeoutError:
            raise LinkBroken("the file did not arrive in time") from None

    async def _work_until(
        self, end: float, header: pb.MediaHeader, data: bytes, charge: contextlib.AsyncExitStack
    ) -> pb.PutMediaResponse:
        """Makes the image and holds it, few at once. The work takes `charge`; a call that ends does not stop it."""
        late = Overloaded("images are decoded too slowly here now", retry_after_s=RETRY_S)
        try:
            async with asyncio.timeout_at(end):
                await self._places.acquire()
        except TimeoutError:
            raise late from None
        charge.callback(self._places.release)
        task = asyncio.create_task(self._work(header, data, charge.pop_all()))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        done, _ = await asyncio.wait((task,), timeout=end - asyncio.get_running_loop().time())
        if not done:
            raise late
        return task.result()

    def _on_done(self, task: asyncio.Task[pb.PutMediaResponse]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where the call has ended

    async def _work(
        self, header: pb.MediaHeader, data: bytes, charge: contextlib.AsyncExitStack
    ) -> pb.PutMediaResponse:
        async with charge:
            prepared = await self._prepare(header, data)
            return await self._hold(header, prepared)

    async def _hold(self, header: pb.MediaHeader, prepared: PreparedImage) -> pb.PutMediaResponse:
        item: HeldMedia[Any, Any] = HeldMedia(
            prepared.inputs, prepared.num_rows, prepared.grid, prepared.num_bytes, prepared.num_rows * self._row_bytes
        )
        if item.num_bytes > self._limits.max_held_bytes:
            message = f"takes {item.num_bytes} bytes in this worker, which holds {self._limits.max_held_bytes}"
            raise _Outcome(pb.MEDIA_OUTCOME_TOO_LARGE, message, prepared.num_rows)
        return await self._give(header, item)

    async def _give(self, header: pb.MediaHeader, item: HeldMedia[Any, Any]) -> pb.PutMediaResponse:
        """Has the engine hold an image. Raises `Overloaded` if it has no room."""
        key = (header.salt, header.identity)
        response = _held(header, item.num_rows, item.grid)
        if not await self._ask(lambda reply: HoldMedia(key, item, reply)):
            raise _no_room()
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
        except (OSError, MemoryError) as error:
            log.error("media_not_decoded", why=repr(error)[:200])
            raise Overloaded("images cannot be decoded here now", retry_after_s=RETRY_S) from None
        except Exception as error:  # of a library; a `ValueError` where the processor says no
            log.warning("media_not_prepared", identity=header.identity.hex(), why=repr(error)[:200])
            raise _Outcome(pb.MEDIA_OUTCOME_UNREADABLE, "is not one that the image processor takes") from None
        if prepared.num_rows > self._limits.max_rows:
            message = f"takes {prepared.num_rows} tokens; {self._limits.max_rows} are the most"
            raise _Outcome(pb.MEDIA_OUTCOME_TOO_LARGE, message, prepared.num_rows)
        return prepared

    async def _ask(self, make: Callable[[Reply[Any]], MediaCommand]) -> Any:
        reply: Reply[Any] = Reply()
        if not self._send(make(reply)):
            raise Overloaded("this prefill worker's mailbox is full", retry_after_s=RETRY_S)
        try:
            return await reply.wait(ENGINE_TIMEOUT_S)
        except DeadlineExceeded:
            raise Overloaded("this prefill worker's engine is busy", retry_after_s=RETRY_S) from None


def _no_room() -> Overloaded:
    return Overloaded("images that are in use leave no room for this one", retry_after_s=RETRY_S)


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
