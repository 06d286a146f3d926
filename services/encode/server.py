"""The Encode service: files from routers, embeddings for prefill workers. Translates messages; makes no decisions."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from baton.domain.errors import BatonError, DeadlineExceeded, Draining, InvalidRequest, LinkBroken, Overloaded
from baton.domain.media.span import IDENTITY_BYTES
from baton.engine.mailbox import Mailbox
from baton.engine.media.exported_embedding import ExportedEmbedding, split_parts
from baton.engine.media.store import HeldMedia
from baton.engine.reply import Reply
from baton.rpc import codec
from baton.rpc.gen import encode_pb2, encode_pb2_grpc, prefill_pb2
from baton.services.encode.commands import ClosePull, EncodeCommand, OpenPull
from baton.services.encode.embedding_exports import EmbeddingExports, OpenedEmbedding
from baton.telemetry import metrics
from baton.worker.media.media_receiver import MediaReceiver
from baton.worker.request_validator import MAX_NAME_CHARS, clamp_duration

RETRY_S = 0.5
MAX_PULL_S = 60.0
MAX_PULLS = 256
"""Pulls that are open at once."""
GRACE_S = 1.0
"""Time after a pull's deadline that it waits for the engine to report it."""

_Context = grpc.aio.ServicerContext[Any, Any]


class EncodeServicer(encode_pb2_grpc.EncodeServicer):
    """`fingerprint`: of the embeddings that are made here. `exports` None: they go by the stream only."""

    exports: EmbeddingExports | None = None

    def __init__(
        self,
        mailbox: Mailbox[EncodeCommand],
        receiver: MediaReceiver,
        fingerprint: str,
        is_draining: Callable[[], bool],
    ) -> None:
        self._mailbox = mailbox
        self._receiver = receiver
        self._fingerprint = fingerprint
        self._is_draining = is_draining
        self._leases = itertools.count(1)
        self._reads: dict[int, asyncio.Event] = {}  # of open pulls by their numbers; set once their pages are read
        self.num_pulls = 0
        """Pulls that are open."""

    async def PutMedia(
        self, requests: AsyncIterator[prefill_pb2.PutMediaRequest], context: _Context
    ) -> prefill_pb2.PutMediaResponse:
        """See encode.proto."""
        if self._is_draining():
            raise Draining("this encode worker is draining", retry_after_s=RETRY_S)
        return await self._receiver.receive(requests, context)

    async def PullEmbedding(
        self, request: encode_pb2.PullEmbeddingRequest, context: _Context
    ) -> AsyncGenerator[encode_pb2.EmbeddingPart, None]:
        """See encode.proto."""
        lease, outcome, clock = next(self._leases), "pull_failed", asyncio.get_running_loop().time
        number = secrets.randbits(63) | 1  # only its reader knows it
        opened: OpenedEmbedding | None = None
        read = asyncio.Event()
        self.num_pulls += 1
        try:
            timeout_s = self._check(request, context)
            end = clock() + timeout_s
            item = await self._open(request, lease, timeout_s)
            assert item.rows is not None
            if self.exports is not None and request.is_linked:
                opened = self.exports.open(request.identity, item.rows)
            header = self._header(request, item, item.rows, opened)
            if opened is not None:
                header.pull, self._reads[number] = number, read
            yield encode_pb2.EmbeddingPart(header=header)
            if opened is not None:
                await _wait_read(read, end - clock())
            for part in split_parts(item.rows.data) if opened is None else ():
                if clock() >= end:
                    raise DeadlineExceeded("the embedding was not read in time")
                yield encode_pb2.EmbeddingPart(data=bytes(part))
            outcome = "exported"
        except BatonError as error:
            await codec.abort(context, error)
        finally:
            self._reads.pop(number, None)
            if self.exports is not None and opened is not None:
                self.exports.close(opened)
            if read.is_set():
                outcome = "exported"  # also where the call was ended before this was noticed
            self.num_pulls -= 1
            metrics.MEDIA_TOTAL.labels(outcome).inc()
            self._mailbox.put(ClosePull(lease))

    async def CommitPull(self, request: encode_pb2.CommitPullRequest, context: _Context) -> encode_pb2.CommitPullReply:
        """See encode.proto."""
        if (read := self._reads.get(request.pull)) is not None:
            read.set()
        return encode_pb2.CommitPullReply()

    def _check(self, request: encode_pb2.PullEmbeddingRequest, context: _Context) -> float:
        """The time of the pull, in s. gRPC ends the call of a reader that stops. Raises `BatonError`."""
        if len(request.identity) != IDENTITY_BYTES or len(request.salt) > MAX_NAME_CHARS:
            raise InvalidRequest("an image has an identity of 16 bytes, and a short salt", param="media")
        if request.fingerprint != self._fingerprint:
            raise LinkBroken("embeddings of this worker are others than the caller's: weights or versions differ")
        left_s = context.time_remaining()
        if left_s is None or left_s > MAX_PULL_S + GRACE_S:
            raise InvalidRequest(f"a call for an embedding ends within {MAX_PULL_S:g} s", param="deadline")
        if self.num_pulls > MAX_PULLS:
            raise Overloaded("too many embeddings are pulled here at once", retry_after_s=RETRY_S)
        return min(MAX_PULL_S, clamp_duration(request.deadline_s, "deadline_s") or MAX_PULL_S)

    async def _open(
        self, request: encode_pb2.PullEmbeddingRequest, lease: int, timeout_s: float
    ) -> HeldMedia[Any, ExportedEmbedding]:
        """The leased image, once it is encoded. Raises `BatonError`."""
        reply: Reply[HeldMedia[Any, ExportedEmbedding]] = Reply()
        if not self._mailbox.try_put(OpenPull(lease, (request.salt, request.identity), timeout_s, reply)):
            raise Overloaded("this encode worker's mailbox is full", retry_after_s=RETRY_S)
        return await reply.wait(timeout_s + GRACE_S)

    def _header(
        self,
        request: encode_pb2.PullEmbeddingRequest,
        item: HeldMedia[Any, ExportedEmbedding],
        rows: ExportedEmbedding,
        opened: OpenedEmbedding | None,
    ) -> encode_pb2.EmbeddingHeader:
        height, width = (0, 0) if item.grid is None else (item.grid.height, item.grid.width)
        return encode_pb2.EmbeddingHeader(
            num_bytes=len(rows.data),
            num_rows=rows.num_rows,
            grid_height=height,
            grid_width=width,
            digests=rows.digests,
            source=self.exports.info if self.exports is not None and request.wants_source else None,
            pages=[] if opened is None else opened.pages,
            tags=[] if opened is None else opened.tags,
        )


async def _wait_read(read: asyncio.Event, timeout_s: float) -> None:
    """Waits until the caller has read the pages. Raises `DeadlineExceeded`."""
    try:
        async with asyncio.timeout(timeout_s):
            await read.wait()
    except TimeoutError:
        raise DeadlineExceeded("the embedding was not read in time") from None
