"""Brings the images of a request to the prefill worker that computes its prompt. Called by `attempt`.

A worker is sent a file once: the uploader remembers what a worker's process has acknowledged. That is a hint, since a
worker forgets images without a message. It then says `need_media`, and the next attempt sends them again. Requests that
need one new image at once share its upload.

With encode workers the file goes to one of them, and prefill is told where to pull the embedding from:

    rank_encoders --(first, then second)--> file to the encode worker --> its name to prefill --> held
                          `--(both failed, or there is none)--> file to prefill, if it has a tower
                                                                `--(it has none)--> again, after a pause; or NeedMedia
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from baton.domain.errors import BatonError, Draining, InvalidRequest, LinkBroken, NeedMedia, Overloaded, WorkerLost
from baton.domain.ids import Incarnation
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.codec import error_from_rpc
from baton.rpc.gen import prefill_pb2
from baton.rpc.media_upload import put_media
from baton.rpc.request_metadata import Metadata
from baton.services.router.dispatch.media.encoder_choice import has_tower, rank_encoders
from baton.services.router.dispatch.placement.absence import WorkerAbsence
from baton.services.router.dispatch.worker_errors import (
    GRACE_S,
    AttemptFailure,
    FaultSource,
    classify_upload_error,
    lost_worker,
)
from baton.services.router.dispatch.workers import WorkerSet
from baton.services.router.generation import MediaFile
from baton.telemetry.metrics import MEDIA_TOTAL, MEDIA_UPLOAD_BYTES_TOTAL, MEDIA_UPLOADS_TOTAL

MAX_ENCODERS = 2
"""Encode workers that are tried for an image before the prefill worker's own tower."""

MAX_LOST = 4
"""Rounds of one attempt in which encode workers fail an image, and none says that it is busy. The next attempt is
placed anew."""

MAX_ENCODE_S = 30.0
"""Longest wait for an encode worker, if that is less than half of what is left of the deadline."""

MAX_REMEMBERED = 1 << 14
"""Images on workers."""

MAX_CONCURRENT = 4
"""Uploads of one request at once."""

MIN_RETRY_S = 0.1
MAX_RETRY_S = 2.0
"""Pause before a file is sent again to workers that have no room for it now. It doubles: the whole file is sent."""

_Held = tuple[Incarnation, str, bytes]
"""Worker process, salt and identity."""

_DOUBTED = (prefill_pb2.MEDIA_OUTCOME_TOO_LARGE, prefill_pb2.MEDIA_OUTCOME_COUNT_DIFFERS)
"""Said by an encode worker, whose limits and libraries are its own. Only `unreadable` ends a request at once."""

_UNSUITED = (prefill_pb2.MEDIA_OUTCOME_OTHER_PROCESSOR, prefill_pb2.MEDIA_OUTCOME_NO_TOWER)
"""Said by a prefill worker whose announcement is older than what it is. It is well, and serves other prompts."""

_REFUSED = (prefill_pb2.MEDIA_OUTCOME_TOO_LARGE, prefill_pb2.MEDIA_OUTCOME_UNREADABLE)


@dataclass(slots=True)
class _EncodeResult:
    """What the encode workers that did not give an image said. `refusal`: of one that another way may not confirm.

    `retry_after_s`: the shortest time that a busy one named.
    """

    is_busy: bool = False
    retry_after_s: float | None = None
    refusal: prefill_pb2.PutMediaResponse | None = None

    def add_busy(self, retry_after_s: float | None) -> None:
        """One takes no image now."""
        self.is_busy = True
        known = [one for one in (self.retry_after_s, retry_after_s) if one is not None]
        self.retry_after_s = min(known, default=None)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """An image for a prefill worker, until `deadline` (on the loop's clock)."""

    worker: WorkerRecord
    file: MediaFile
    salt: str
    deadline: float
    metadata: Metadata

    def encode_s(self) -> float:
        """Time for an encode worker: it leaves as much for another way."""
        return min(MAX_ENCODE_S, max(0.0, self.deadline - asyncio.get_running_loop().time()) / 2)


class MediaUploader:
    """Owned by one event loop."""

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        self._held: OrderedDict[_Held, None] = OrderedDict()
        self._under_way: dict[_Held, asyncio.Future[prefill_pb2.PutMediaResponse | None]] = {}

    async def put(
        self, worker: WorkerRecord, files: Sequence[MediaFile], salt: str, deadline: float, metadata: Metadata
    ) -> float:
        """Sends the files that the worker is not known to hold, until `deadline` (on the loop's clock).

        Returns the seconds until it had their embeddings by way of encode workers; 0 where none could encode for it.
        One that this router does not have is left out. A worker without room is asked again. Raises `AttemptFailure`,
        or an error that ends the request: `InvalidRequest` for a file that is no image.
        """
        missing = {file.identity: file for file in files if file.data is not None}
        for identity in [one for one in missing if self._knows((worker.incarnation, salt, one))]:
            del missing[identity]
        if not missing:
            return 0.0
        clock = asyncio.get_running_loop().time
        begun_at = clock() if self._workers.encode_workers(worker) else None
        turns = asyncio.Semaphore(MAX_CONCURRENT)

        async def bring(file: MediaFile) -> None:
            async with turns:
                await self._bring(worker, file, salt, deadline, metadata)

        tasks = [asyncio.create_task(bring(file), name="put-media") for file in missing.values()]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return 0.0 if begun_at is None else clock() - begun_at

    def on_missing(self, worker: WorkerRecord, salt: str, error: NeedMedia) -> None:
        """Records that the worker lacks images."""
        for identity in error.identities:
            self._held.pop((worker.incarnation, salt, identity), None)

    def _knows(self, key: _Held) -> bool:
        if key not in self._held:
            return False
        self._held.move_to_end(key)
        return True

    async def _bring(
        self, worker: WorkerRecord, file: MediaFile, salt: str, deadline: float, metadata: Metadata
    ) -> None:
        """Returns when the prefill worker holds the image."""
        delivery = _Delivery(worker, file, salt, deadline, metadata)
        reply = await self._share((worker.incarnation, salt, file.identity), lambda: self._deliver(delivery))
        if reply is not None and (refusal := _refusal(reply, file)) is not None:
            raise refusal

    async def _share(
        self, key: _Held, send: Callable[[], Awaitable[prefill_pb2.PutMediaResponse]]
    ) -> prefill_pb2.PutMediaResponse | None:
        """The reply of `send`, or of one for the same key that is under way. None: it is held already."""
        reply: prefill_pb2.PutMediaResponse | None = None
        while reply is None:
            if self._knows(key):
                return None
            if (under_way := self._under_way.get(key)) is not None:
                await asyncio.wait([under_way])
                reply = under_way.result()  # None: that upload failed, or its request is gone
                continue
            shared = self._under_way[key] = asyncio.get_running_loop().create_future()
            try:
                reply = await send()
                if reply.outcome == prefill_pb2.MEDIA_OUTCOME_HELD:
                    self._remember(key)
            finally:
                del self._under_way[key]
                shared.set_result(reply)
        return reply

    async def _deliver(self, to: _Delivery) -> prefill_pb2.PutMediaResponse:
        """Has the image encoded elsewhere, or sends it. Returns the prefill worker's reply, or a file's refusal."""
        clock, pause_s, num_lost = asyncio.get_running_loop().time, MIN_RETRY_S, 0
        while True:
            result = _EncodeResult()
            encoders = rank_encoders(self._workers.encode_workers(to.worker), to.file.identity)[:MAX_ENCODERS]
            for encoder in encoders:
                reply = await self._encode_at(encoder, to, result)
                MEDIA_TOTAL.labels("encoder_failed" if reply is None else "encoder_used").inc()
                if reply is not None:
                    return reply
            if has_tower(to.worker):
                return await self._send(to)
            num_lost += not result.is_busy
            if result.refusal is not None and not result.is_busy:
                return result.refusal
            if not encoders or num_lost == MAX_LOST or clock() >= to.deadline:
                missing = NeedMedia(f"no encode worker takes an image for {to.worker.id}", (to.file.identity,))
                raise AttemptFailure(missing, FaultSource.NOTHING)
            await asyncio.sleep(min(max(result.retry_after_s or 0.0, pause_s), MAX_RETRY_S))
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _encode_at(
        self, encoder: WorkerRecord, to: _Delivery, result: _EncodeResult
    ) -> prefill_pb2.PutMediaResponse | None:
        """The reply of prefill once the encode worker has the image, or a file's refusal. None: it is no use now."""
        key, name = (encoder.incarnation, to.salt, to.file.identity), prefill_pb2.EmbeddingSource()
        name.worker_id, name.incarnation = encoder.id, encoder.incarnation
        while True:
            was_known = self._knows(key)
            try:
                reply = await self._share(key, lambda: self._put(encoder, to))
            except AttemptFailure as failure:
                if failure.unready:
                    result.add_busy(failure.retry_after_s)
                elif self._is_present(encoder):
                    self._workers.suspect(encoder, failure.error)
                return None
            if reply is not None and reply.outcome == prefill_pb2.MEDIA_OUTCOME_UNREADABLE:
                return reply
            if reply is not None and reply.outcome != prefill_pb2.MEDIA_OUTCOME_HELD:
                if reply.outcome in _DOUBTED:
                    result.refusal = reply
                return None
            pulled = await self._name(encoder, to, name)
            if pulled is None or pulled.outcome != prefill_pb2.MEDIA_OUTCOME_SOURCE_LOST:
                return pulled
            self._held.pop(key, None)
            if not was_known:  # else it may have been evicted there since
                return None

    def _is_present(self, encoder: WorkerRecord) -> bool:
        return self._workers.absence(encoder) is WorkerAbsence.NONE

    async def _name(
        self, encoder: WorkerRecord, to: _Delivery, name: prefill_pb2.EmbeddingSource
    ) -> prefill_pb2.PutMediaResponse | None:
        """Has prefill pull the embedding. None, and prefill is told to stop, once the encode worker is lost."""
        if not self._is_present(encoder):
            return None
        pulling = asyncio.create_task(self._send(to, name), name="pull-embedding")

        def stop() -> None:
            pulling.cancel()

        unwatch = self._workers.watch(encoder.incarnation, stop)
        try:
            return await pulling
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None
        finally:
            unwatch()

    async def _put(self, encoder: WorkerRecord, to: _Delivery) -> prefill_pb2.PutMediaResponse:
        """Sends the file to an encode worker, once. Raises `AttemptFailure`; `unready` if the worker says so itself."""
        if not self._is_present(encoder):  # it failed another request, whose upload this one has waited for
            raise AttemptFailure(WorkerLost(f"encode {encoder.id} is left alone now"), FaultSource.NOTHING)
        timeout_s = to.encode_s()
        data, header = _encode(to.file, to.salt, timeout_s)
        try:
            stub, count = self._workers.encode_stub(encoder), MEDIA_UPLOAD_BYTES_TOTAL.inc
            return await put_media(stub, header, data, timeout_s + GRACE_S, to.metadata, count)
        except grpc.aio.AioRpcError as error:
            reported = error_from_rpc(error)
            lost = WorkerLost(f"encode {encoder.id} failed: {reported.code}: {reported}")
            failure = AttemptFailure(lost, FaultSource.NOTHING)
            if isinstance(reported, Overloaded | Draining):
                failure.unready, failure.retry_after_s = True, reported.retry_after_s
            raise failure from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise AttemptFailure(WorkerLost(f"encode {encoder.id} was lost"), FaultSource.NOTHING) from None

    def _remember(self, key: _Held) -> None:
        self._held[key] = None
        while len(self._held) > MAX_REMEMBERED:
            self._held.popitem(last=False)

    async def _send(
        self, to: _Delivery, source: prefill_pb2.EmbeddingSource | None = None
    ) -> prefill_pb2.PutMediaResponse:
        """Sends the file, or the name of its `source`, again and again while prefill has no room.

        The request's deadline cancels that.
        """
        clock, pause_s = asyncio.get_running_loop().time, MIN_RETRY_S / 2
        while True:
            timeout_s = max(0.0, to.deadline - clock()) if source is None else to.encode_s()
            data, header = _encode(to.file, to.salt, timeout_s, source)
            try:
                stub = self._workers.prefill_stub(to.worker)
                count = MEDIA_UPLOAD_BYTES_TOTAL.inc
                reply = await put_media(stub, header, data, timeout_s + GRACE_S, to.metadata, count)
                MEDIA_UPLOADS_TOTAL.labels(_outcome_name(reply.outcome)).inc()
                return reply
            except grpc.aio.AioRpcError as error:
                reported = error_from_rpc(error)
                MEDIA_UPLOADS_TOTAL.labels("busy" if isinstance(reported, Overloaded) else "failed").inc()
                if not isinstance(reported, Overloaded) or clock() >= to.deadline:
                    raise classify_upload_error(error) from None
                pause_s = min(max(reported.retry_after_s or 0.0, 2 * pause_s), MAX_RETRY_S)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise lost_worker(WorkerRole.PREFILL, "was lost before it had an image") from None
            await asyncio.sleep(pause_s)


def _encode(
    file: MediaFile, salt: str, timeout_s: float, source: prefill_pb2.EmbeddingSource | None = None
) -> tuple[bytes, prefill_pb2.MediaHeader]:
    """The bytes to send, none with a `source`, and their header."""
    data = file.data
    assert data is not None
    return b"" if source is not None else data, prefill_pb2.MediaHeader(
        source=source,
        identity=file.identity,
        num_bytes=len(data),
        salt=salt,
        processor=file.processor,
        detail=file.detail,
        num_rows=file.num_rows,
        grid_height=0 if file.grid is None else file.grid.height,
        grid_width=0 if file.grid is None else file.grid.width,
        deadline_s=timeout_s,
    )


def _outcome_name(outcome: int) -> str:
    known = outcome in prefill_pb2.MediaOutcome.values()
    return prefill_pb2.MediaOutcome.Name(outcome).removeprefix("MEDIA_OUTCOME_").lower() if known else "unspecified"


def _refusal(reply: prefill_pb2.PutMediaResponse, file: MediaFile) -> BatonError | AttemptFailure | None:
    """What a reply other than `held` means for the request."""
    if reply.outcome == prefill_pb2.MEDIA_OUTCOME_HELD:
        return None
    if reply.outcome in _REFUSED:
        return InvalidRequest(f"{file.param}: the image {reply.message[:200] or 'cannot be read'}", param=file.param)
    if reply.outcome == prefill_pb2.MEDIA_OUTCOME_COUNT_DIFFERS:
        counted = f"{reply.num_rows} tokens when it is decoded, {file.num_rows} by its header"
        return InvalidRequest(f"{file.param}: the image takes {counted}", param=file.param)
    why = f"prefill does not take images of this router: {_outcome_name(reply.outcome)}"
    if reply.outcome in _UNSUITED:
        return AttemptFailure(LinkBroken(why), FaultSource.PREFILL)
    return AttemptFailure(WorkerLost(why), FaultSource.PREFILL, unready=True)
