"""Brings the images of a request to the prefill worker that encodes them. Called by `attempt`.

A worker is sent a file once: the uploader remembers what a worker's process has acknowledged. That is a hint, since a
worker forgets images without a message. It then says `need_media`, and the next attempt sends them again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import grpc

from baton.domain.errors import BatonError, Broken, InvalidRequest, NeedMedia, WorkerLost
from baton.domain.ids import Incarnation
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.gen import prefill_pb2
from baton.rpc.media_upload import put_media
from baton.rpc.request_metadata import Metadata
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource, classify_rpc_error
from baton.services.router.dispatch.workers import WorkerSet
from baton.services.router.generation import MediaFile

MAX_REMEMBERED = 1 << 14
"""Images on workers."""

MAX_CONCURRENT = 4
"""Uploads of one request at once."""

_Held = tuple[Incarnation, str, bytes]
"""Worker process, salt and identity."""

_REFUSED = (prefill_pb2.MEDIA_OUTCOME_TOO_LARGE, prefill_pb2.MEDIA_OUTCOME_UNREADABLE)


class MediaUploader:
    """Owned by one event loop."""

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        self._held: OrderedDict[_Held, None] = OrderedDict()

    async def put(
        self, worker: WorkerRecord, files: Sequence[MediaFile], salt: str, deadline: float, metadata: Metadata
    ) -> None:
        """Sends the files that the worker is not known to hold, until `deadline` (on the loop's clock).

        One that this router does not have is left out. Raises `AttemptFailure`, or an error that ends the request:
        `InvalidRequest` for a file that is no image.
        """
        missing = {file.identity: file for file in files if file.data is not None}
        for identity in [one for one in missing if self._knows((worker.incarnation, salt, one))]:
            del missing[identity]
        turns = asyncio.Semaphore(MAX_CONCURRENT)

        async def send(file: MediaFile) -> None:
            async with turns:
                await self._send(worker, file, salt, deadline, metadata)

        tasks = [asyncio.create_task(send(file), name="put-media") for file in missing.values()]
        try:
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def on_missing(self, worker: WorkerRecord, files: Iterable[MediaFile], salt: str, error: NeedMedia) -> None:
        """Records that the worker lacks images. Raises `error` if this router cannot send them."""
        lost = {file.identity for file in files if file.data is None}
        for identity in error.identities:
            self._held.pop((worker.incarnation, salt, identity), None)
        if lost.intersection(error.identities):
            raise error

    def _knows(self, key: _Held) -> bool:
        if key not in self._held:
            return False
        self._held.move_to_end(key)
        return True

    async def _send(
        self, worker: WorkerRecord, file: MediaFile, salt: str, deadline: float, metadata: Metadata
    ) -> None:
        data = file.data
        assert data is not None
        timeout_s = max(0.0, deadline - asyncio.get_running_loop().time())
        header = prefill_pb2.MediaHeader(
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
        try:
            reply = await put_media(self._workers.prefill_stub(worker), header, data, timeout_s, metadata)
        except grpc.aio.AioRpcError as error:
            raise classify_rpc_error(error, WorkerRole.PREFILL) from None
        if (refusal := _refusal(reply, file)) is not None:
            raise refusal
        self._held[worker.incarnation, salt, file.identity] = None
        while len(self._held) > MAX_REMEMBERED:
            self._held.popitem(last=False)


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
        counted = f"{reply.num_rows} rows of {reply.grid_height} x {reply.grid_width}"
        return Broken(f"a worker counts {counted} for an image, the router {file.num_rows} of {file.grid}")
    lost = WorkerLost(f"prefill does not take images of this router: {_outcome_name(reply.outcome)}")
    return AttemptFailure(lost, FaultSource.PREFILL, unready=True)
