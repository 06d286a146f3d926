"""Uploads of images: shared by requests, ended by the first error, and longer than the deadline of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.domain.errors import BatonError, Draining, InvalidRequest, Overloaded, WorkerLost, from_code
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.media.identity import media_identity
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.codec import rpc_error
from baton.rpc.gen import prefill_pb2
from baton.services.router.dispatch.media.uploader import MediaUploader
from baton.services.router.dispatch.placement.absence import WorkerAbsence
from baton.services.router.dispatch.worker_errors import GRACE_S, AttemptFailure, FaultSource
from baton.services.router.generation import MediaFile

PROCESSOR = "p" * 32
WORKER: Any = SimpleNamespace(incarnation=1, id="prefill-0", capabilities=())
HELD = prefill_pb2.MEDIA_OUTCOME_HELD


def image(data: bytes) -> MediaFile:
    return MediaFile(media_identity(data, PROCESSOR), data, len(data), PROCESSOR, "auto", 4, None, "messages[0]")


class Uploads:
    """A prefill worker. Uploads stay under way until the test ends them with `end`."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []
        self.open: asyncio.Queue[asyncio.Future[int]] = asyncio.Queue()
        self.uploader = MediaUploader(self)  # type: ignore[arg-type]
        self.encoders: list[WorkerRecord] = []
        self.suspected: list[str] = []

    def encode_workers(self, prefill: Any) -> list[Any]:
        return [one for one in self.encoders if one.id not in self.suspected]

    def encode_stub(self, worker: Any) -> Any:
        return self

    def absence(self, worker: Any) -> WorkerAbsence:
        return WorkerAbsence.SUSPECTED if worker.id in self.suspected else WorkerAbsence.NONE

    def suspect(self, worker: Any, reason: BatonError) -> None:
        self.suspected.append(worker.id)

    def prefill_stub(self, worker: Any) -> Any:
        return self

    async def PutMedia(self, requests: Any, *, timeout: float, metadata: Any) -> prefill_pb2.PutMediaResponse:
        self.timeouts.append(timeout)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.open.put_nowait(future)
        outcome: Any = await future
        return prefill_pb2.PutMediaResponse(outcome=outcome, message="is damaged")

    def put(self, *data: bytes, in_s: float = 60.0, worker: Any = WORKER) -> asyncio.Task[float]:
        deadline = asyncio.get_running_loop().time() + in_s
        return asyncio.create_task(self.uploader.put(worker, [image(one) for one in data], "", deadline, ()))

    async def end(self, how: int | BatonError = HELD) -> None:
        """Ends the next upload."""
        future = await self.open.get()
        if isinstance(how, BatonError):
            future.set_exception(rpc_error(how))
        else:
            future.set_result(how)


@pytest.fixture
async def uploads() -> Uploads:
    return Uploads()


async def both(uploads: Uploads, interrupt: Callable[[asyncio.Task[float]], object] | None = None) -> list[Any]:
    """Two requests that need one image; what becomes of them once the first upload began."""
    first, second = uploads.put(b"red"), uploads.put(b"red")
    uploads.open.put_nowait(await uploads.open.get())
    if interrupt is not None:
        interrupt(first)
    return [first, second]


async def test_requests_share_an_upload(uploads):
    tasks = await both(uploads)
    await uploads.end()
    await asyncio.gather(*tasks)
    await uploads.put(b"red")
    assert len(uploads.timeouts) == 1


async def test_a_request_that_is_cancelled_leaves_its_upload_to_the_next(uploads):
    first, second = await both(uploads, lambda task: task.cancel())
    (await uploads.open.get()).cancel()
    await uploads.end()
    await second
    assert first.cancelled()
    assert len(uploads.timeouts) == 2


async def test_a_follower_that_is_cancelled_stops_no_upload(uploads):
    first, second = await both(uploads)
    second.cancel()
    await asyncio.wait([second])
    await uploads.end()
    await first
    assert len(uploads.timeouts) == 1


async def test_a_failed_upload_is_tried_again_by_the_next(uploads):
    first, second = await both(uploads)
    await uploads.end(Draining("drains"))
    await uploads.end()
    await second
    with pytest.raises(AttemptFailure):
        await first


async def test_a_refused_file_is_refused_for_all(uploads):
    tasks = await both(uploads)
    await uploads.end(prefill_pb2.MEDIA_OUTCOME_UNREADABLE)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [InvalidRequest, InvalidRequest]
    assert len(uploads.timeouts) == 1


async def test_the_first_error_ends_all_uploads_of_a_request(uploads):
    putting = uploads.put(b"red", b"blue")
    stuck = await uploads.open.get()
    await uploads.end(Draining("drains"))
    with pytest.raises(AttemptFailure):
        await asyncio.wait_for(putting, 10)
    assert stuck.cancelled()


async def test_a_call_outlasts_the_deadline_which_the_attempt_reports(uploads):
    putting = uploads.put(b"red", in_s=5.0)
    await uploads.end()
    await putting
    assert 5.0 < uploads.timeouts[0] <= 5.0 + GRACE_S


async def test_a_worker_without_room_is_asked_again_until_the_deadline(uploads):
    putting = uploads.put(b"red")
    for _ in range(2):
        await uploads.end(Overloaded("no room"))
    await uploads.end()
    await putting
    assert len(uploads.timeouts) == 3


@pytest.mark.parametrize("code", ["link_broken", "integrity_failure", "worker_lost"])
async def test_failures_of_an_upload_are_those_of_prefill(uploads, code):
    putting = uploads.put(b"red")
    await uploads.end(from_code(code, "said so"))
    with pytest.raises(AttemptFailure) as failed:
        await putting
    assert failed.value.fault_source is FaultSource.PREFILL
    assert not failed.value.blames_link


async def test_followers_leave_an_encode_worker_that_failed(uploads):
    """One file to it, for three prefill workers; then a file to each of those."""
    record = WorkerRecord(WorkerId("encode-0"), WorkerRole.ENCODE, Incarnation(9), "there", "m", "", 0, 1, 1)
    uploads.encoders.append(record)
    workers = [SimpleNamespace(incarnation=number, id=f"prefill-{number}", capabilities=()) for number in range(3)]
    tasks = [uploads.put(b"red", worker=worker) for worker in workers]
    await uploads.end(WorkerLost("hangs"))
    for _ in workers:
        await uploads.end()
    await asyncio.gather(*tasks)
    assert (len(uploads.timeouts), uploads.suspected) == (1 + 3, ["encode-0"])
