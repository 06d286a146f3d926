"""Uploads of images: limits before bytes, typed outcomes, idempotence, and nothing left behind by a broken one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.domain.errors import BatonError, InvalidRequest, LinkBroken, Overloaded
from baton.domain.media.identity import media_identity
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.engine.media.store import MediaStore
from baton.model.vision.embedding import MediaEmbedding
from baton.model.vision.image_processor import PreparedImage
from baton.rpc.channel import GO_AHEAD
from baton.rpc.gen import prefill_pb2 as pb
from baton.rpc.media_upload import media_parts
from baton.worker.media.embedding_puller import EmbeddingLost, PulledEmbedding
from baton.worker.media.image_decoder import RgbImage, UnreadableMedia
from baton.worker.media.media_receiver import (
    MAX_DECODING,
    FindMedia,
    HoldMedia,
    MediaCommand,
    MediaLimits,
    MediaReceiver,
    RoomQuery,
    media_limits,
)

DIGEST = "p"
FILE = b"a file of forty bytes, or a little longer"
LIMITS = MediaLimits(max_file_bytes=100, max_rows=8, max_held_bytes=1000, max_open_bytes=150)


class Context:
    """Of one call."""

    def __init__(self) -> None:
        self.went_ahead = False

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        self.went_ahead = GO_AHEAD in dict(metadata)


class Decoder:
    """Says that every file but `bad` is an image of two pixels."""

    bad = b""
    error: Exception | None = None

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.num_running = self.most_running = 0

    async def decode(self, data: bytes) -> RgbImage:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await self.may_go_on.wait()
        self.num_running -= 1
        if self.error is not None:
            raise self.error
        if data == self.bad:
            raise UnreadableMedia("is damaged")
        return RgbImage(2, 1, b"rgbrgb")


class Processor:
    def prepare(self, width: int, height: int, pixels: bytes, detail: str = "") -> PreparedImage:
        return PreparedImage({"pixel_values": torch.zeros(4)}, 4, None)


class Worker:
    """A receiver, and an engine that answers at once."""

    def __init__(self, max_bytes: int = 1000, limits: MediaLimits = LIMITS) -> None:
        self.store: MediaStore[Any, Any] = MediaStore(max_bytes)
        self.decoder = Decoder()
        decoder, processor = self.decoder, Processor()
        self.receiver = MediaReceiver(processor, DIGEST, 8, decoder, limits, self.take)  # type: ignore[arg-type]

    def take(self, command: MediaCommand) -> bool:
        match command:
            case FindMedia(key, reply):
                item = self.store.find(key)
                reply.send(None if item is None else (item.num_rows, item.grid))
            case RoomQuery(num_bytes, has_room):
                has_room.send(self.store.has_room(num_bytes, 0.0))
            case HoldMedia(key, item, held):
                held.send(self.store.hold(key, item))
        return True

    async def put(self, requests: Iterable[pb.PutMediaRequest]) -> tuple[pb.PutMediaResponse, bool]:
        """The reply, and whether the bytes were asked for."""

        async def stream() -> AsyncIterator[pb.PutMediaRequest]:
            for request in requests:
                yield request

        context = Context()
        return await self.receiver.receive(stream(), context), context.went_ahead


def header(data: bytes = FILE, **fields: Any) -> pb.MediaHeader:
    made = pb.MediaHeader(
        identity=media_identity(data, DIGEST), num_bytes=len(data), salt="s", processor=DIGEST, num_rows=4
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


async def test_an_image_is_held_once_and_its_bytes_are_not_asked_for_again():
    worker = Worker()
    for expected in (True, False):
        response, went_ahead = await worker.put(media_parts(header(), FILE))
        assert (response.outcome, response.num_rows) == (pb.MEDIA_OUTCOME_HELD, 4)
        assert went_ahead is expected
    assert len(worker.store) == 1
    item = worker.store.find(("s", header().identity))
    assert item is not None
    assert (item.input_bytes, item.row_bytes) == (16, 32)


@pytest.mark.parametrize(
    ("fields", "outcome", "is_read"),
    [
        ({"num_bytes": 101}, pb.MEDIA_OUTCOME_TOO_LARGE, False),
        ({"num_rows": 9}, pb.MEDIA_OUTCOME_TOO_LARGE, False),
        ({"processor": "q"}, pb.MEDIA_OUTCOME_OTHER_PROCESSOR, False),
        ({"num_rows": 5}, pb.MEDIA_OUTCOME_COUNT_DIFFERS, True),
        ({"grid_height": 2, "grid_width": 2}, pb.MEDIA_OUTCOME_COUNT_DIFFERS, True),
    ],
)
async def test_an_image_that_is_refused_leaves_nothing(fields: dict[str, Any], outcome: int, is_read: bool):
    worker = Worker()
    response, went_ahead = await worker.put(media_parts(header(**fields), FILE))
    assert (response.outcome, went_ahead, len(worker.store)) == (outcome, is_read, 0)
    assert response.message


async def test_an_unreadable_image_is_named_so():
    worker = Worker()
    worker.decoder.bad = FILE
    response, _ = await worker.put(media_parts(header(), FILE))
    assert (response.outcome, response.message) == (pb.MEDIA_OUTCOME_UNREADABLE, "is damaged")


BROKEN: dict[str, tuple[list[pb.PutMediaRequest], type[BatonError]]] = {
    "no message": ([], LinkBroken),
    "no header": ([pb.PutMediaRequest(data=b"x")], LinkBroken),
    "an empty message": ([pb.PutMediaRequest()], LinkBroken),
    "a short identity": (list(media_parts(header(identity=b"x"), FILE)), InvalidRequest),
    "a deadline that is no number": (list(media_parts(header(deadline_s=float("nan")), FILE)), InvalidRequest),
    "too few bytes": (list(media_parts(header(), FILE[:-1])), LinkBroken),
    "too many bytes": (list(media_parts(header(), FILE + b"x")), LinkBroken),
    "other bytes": (list(media_parts(header(), FILE[::-1])), LinkBroken),
    "two headers": ([*media_parts(header(), b""), *media_parts(header(), FILE)], LinkBroken),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_upload_is_a_typed_error_and_frees_its_bytes(name: str):
    requests, error = BROKEN[name]
    worker = Worker()
    for _ in range(5):
        with pytest.raises(error):
            await worker.put(requests)
    assert len(worker.store) == 0
    response, _ = await worker.put(media_parts(header(), FILE))
    assert response.outcome == pb.MEDIA_OUTCOME_HELD


async def test_a_store_without_room_is_overload():
    with pytest.raises(Overloaded):
        await Worker(max_bytes=10).put(media_parts(header(), FILE))


def test_the_rows_of_an_image_are_bounded_by_context_and_budget():
    assert media_limits(100_000, 1024, 7).max_rows == 16 * 1024
    assert media_limits(4096, 1024, 7).max_rows == 4096
    assert media_limits(4096, 1024, 7).max_held_bytes == 7


async def test_an_image_that_never_fits_the_store_is_refused_for_good():
    """It takes 16 bytes of tensors and 32 of rows."""
    for max_bytes, outcome in ((47, pb.MEDIA_OUTCOME_TOO_LARGE), (48, pb.MEDIA_OUTCOME_HELD)):
        worker = Worker(max_bytes, replace(LIMITS, max_held_bytes=max_bytes))
        response, _ = await worker.put(media_parts(header(), FILE))
        assert response.outcome == outcome


@pytest.mark.parametrize("error", [OSError("no process can be started"), MemoryError()])
async def test_a_worker_that_cannot_decode_now_is_overload(error: Exception):
    worker = Worker()
    worker.decoder.error = error
    with pytest.raises(Overloaded):
        await worker.put(media_parts(header(), FILE))
    worker.decoder.error = TypeError("of a library")
    response, _ = await worker.put(media_parts(header(), FILE))
    assert response.outcome == pb.MEDIA_OUTCOME_UNREADABLE


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


def small(number: int) -> bytes:
    return bytes([number]) * 20


async def test_few_images_are_decoded_at_once_and_their_bytes_count_until_then():
    """A call that ends takes its waiting work along; work that runs keeps its place and its bytes until it is done."""
    worker = Worker()
    decoder = worker.decoder
    decoder.may_go_on.clear()
    calls = [asyncio.create_task(worker.put(media_parts(header(small(n)), small(n)))) for n in range(7)]
    await until(lambda: decoder.num_running == MAX_DECODING and worker.receiver._open_bytes == 140)
    with pytest.raises(Overloaded):
        await worker.put(media_parts(header(small(9)), small(9)))
    for call in calls[:4]:
        call.cancel()
    await asyncio.gather(*calls[:4], return_exceptions=True)
    assert (decoder.num_running, worker.receiver._open_bytes) == (2, 5 * 20), "two run, three wait"
    decoder.may_go_on.set()
    for response, _ in await asyncio.gather(*calls[4:]):
        assert response.outcome == pb.MEDIA_OUTCOME_HELD
    assert (decoder.most_running, worker.receiver._open_bytes) == (MAX_DECODING, 0)


async def test_a_slow_decoder_is_overload_and_a_slow_file_a_broken_link():
    worker = Worker()
    worker.decoder.may_go_on.clear()
    with pytest.raises(Overloaded):
        await worker.put(media_parts(header(deadline_s=0.05), FILE))

    async def silent() -> AsyncIterator[pb.PutMediaRequest]:
        yield pb.PutMediaRequest(header=header(small(1), deadline_s=0.05))
        await asyncio.Event().wait()

    with pytest.raises(LinkBroken, match="in time"):
        await worker.receiver.receive(silent(), Context())
    assert worker.receiver._open_bytes == len(FILE), "the work of the first call still runs"
    worker.decoder.may_go_on.set()
    await until(lambda: not worker.receiver._open_bytes)


async def test_a_busy_engine_is_overload(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.worker.media.media_receiver.ENGINE_TIMEOUT_S", 0.01)
    worker = Worker()
    worker.receiver._send = lambda command: True
    with pytest.raises(Overloaded, match="busy"):
        await worker.put(media_parts(header(), FILE))


async def test_open_uploads_are_bounded_together():
    worker, inner = Worker(), list[type[BatonError]]()

    async def slow() -> AsyncIterator[pb.PutMediaRequest]:
        yield pb.PutMediaRequest(header=header(num_bytes=100))
        try:
            await worker.put(media_parts(header(b"y" * 60), b"y" * 60))
        except Overloaded as error:
            inner.append(type(error))
        yield pb.PutMediaRequest(data=b"x")

    with pytest.raises(LinkBroken):
        await worker.receiver.receive(slow(), Context())
    assert inner == [Overloaded]
    response, _ = await worker.put(media_parts(header(b"y" * 60), b"y" * 60))
    assert response.outcome == pb.MEDIA_OUTCOME_HELD


PARTS = st.one_of(
    st.builds(lambda data: pb.PutMediaRequest(data=data), st.binary(max_size=120)),
    st.builds(
        lambda **fields: pb.PutMediaRequest(header=pb.MediaHeader(**fields)),
        identity=st.sampled_from([b"", header().identity, b"x" * 16]),
        num_bytes=st.sampled_from([0, 1, len(FILE), 100, 101, 2**63]),
        salt=st.sampled_from(["", "s", "s" * 300]),
        processor=st.sampled_from(["", DIGEST]),
        num_rows=st.sampled_from([0, 4, 8, 9, 2**31]),
        grid_height=st.sampled_from([0, 2]),
        deadline_s=st.sampled_from([0.0, -1.0, float("inf"), float("nan")]),
    ),
    st.just(pb.PutMediaRequest()),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(PARTS, max_size=5))
async def test_any_stream_has_an_outcome_or_a_typed_error(parts: list[pb.PutMediaRequest]):
    worker = Worker()
    try:
        response, _ = await worker.put(parts)
    except (InvalidRequest, LinkBroken, Overloaded):
        pass
    else:
        assert response.outcome != pb.MEDIA_OUTCOME_UNSPECIFIED
    if FILE not in {part.data for part in parts}:
        assert len(worker.store) == 0
    response, _ = await worker.put(media_parts(header(), FILE))
    assert response.outcome == pb.MEDIA_OUTCOME_HELD


class Puller:
    """Gives `result`, or raises it, once the image is encoded and the bytes are here."""

    def __init__(self, result: PulledEmbedding | EmbeddingLost) -> None:
        self.result = result
        self.headers: list[pb.MediaHeader] = []
        self.is_encoded, self.has_bytes = asyncio.Event(), asyncio.Event()
        self.is_encoded.set()
        self.has_bytes.set()

    async def pull(self, header: pb.MediaHeader, timeout_s: float, take_room: Callable[[], None]) -> PulledEmbedding:
        self.headers.append(header)
        await self.is_encoded.wait()
        take_room()
        await self.has_bytes.wait()
        if isinstance(self.result, EmbeddingLost):
            raise self.result
        return self.result


def from_encoder(**fields: Any) -> list[pb.PutMediaRequest]:
    made = header(**fields)
    made.source.worker_id, made.source.incarnation = "encode-0", 7
    return [pb.PutMediaRequest(header=made)]


PULLED = PulledEmbedding(SettledEmbedding.settle(MediaEmbedding(torch.ones(4, 2))), 4, None)


async def test_an_embedding_is_pulled_once_and_no_byte_is_asked_for():
    worker, puller = Worker(), Puller(PULLED)
    worker.receiver.puller = puller  # type: ignore[assignment]
    for _ in range(2):
        response, went_ahead = await worker.put(from_encoder())
        assert (response.outcome, response.num_rows, went_ahead) == (pb.MEDIA_OUTCOME_HELD, 4, False)
    assert [one.source.worker_id for one in puller.headers] == ["encode-0"]
    item = worker.store.find(("s", header().identity))
    assert item is not None
    assert (item.inputs, item.rows, item.num_bytes) == (None, PULLED.embedding, 32)


@pytest.mark.parametrize(
    ("puller", "fields", "outcome"),
    [
        (None, {}, pb.MEDIA_OUTCOME_SOURCE_LOST),
        (Puller(EmbeddingLost("gone")), {}, pb.MEDIA_OUTCOME_SOURCE_LOST),
        (Puller(PULLED), {"processor": "q"}, pb.MEDIA_OUTCOME_OTHER_PROCESSOR),
        (Puller(PULLED), {"num_rows": 9}, pb.MEDIA_OUTCOME_TOO_LARGE),
        (Puller(PULLED), {"grid_height": 2, "grid_width": 2}, pb.MEDIA_OUTCOME_COUNT_DIFFERS),
    ],
)
async def test_an_embedding_that_cannot_be_used_leaves_nothing(puller: Any, fields: dict[str, Any], outcome: int):
    worker = Worker()
    worker.receiver.puller = puller
    response, _ = await worker.put(from_encoder(**fields))
    assert (response.outcome, len(worker.store), worker.receiver._open_bytes) == (outcome, 0, 0)


async def test_pulls_that_wait_for_an_encode_worker_take_no_room():
    """Many wait on one that hangs. Files go on; the bytes count from when they come."""
    limits = replace(LIMITS, max_open_bytes=50)  # one embedding, of 32 bytes, or one file
    worker, puller = Worker(limits=limits), Puller(PULLED)
    puller.is_encoded.clear()
    puller.has_bytes.clear()
    worker.receiver.puller = puller  # type: ignore[assignment]
    pulls = [asyncio.create_task(worker.put(from_encoder(salt=str(number)))) for number in range(20)]
    await until(lambda: len(puller.headers) == 20)
    assert worker.receiver._open_bytes == 0
    assert (await worker.put(media_parts(header(), FILE)))[0].outcome == pb.MEDIA_OUTCOME_HELD
    puller.is_encoded.set()
    await until(lambda: sum(pull.done() for pull in pulls) == 19)
    assert worker.receiver._open_bytes == 32
    puller.has_bytes.set()
    refused = [one for one in await asyncio.gather(*pulls, return_exceptions=True) if isinstance(one, Overloaded)]
    assert (len(refused), worker.receiver._open_bytes) == (19, 0)


async def test_a_worker_without_a_tower_takes_no_files():
    worker = Worker()
    worker.receiver.has_tower = False
    response, went_ahead = await worker.put(media_parts(header(), FILE))
    assert (response.outcome, went_ahead, len(worker.store)) == (pb.MEDIA_OUTCOME_NO_TOWER, False, 0)
