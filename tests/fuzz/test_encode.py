"""Garbage on an encode worker, and a malicious one: typed errors, no crash, no hang, nothing kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import Broken, from_code
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.engine.media.exported_embedding import PART_BYTES, part_digests, split_parts
from baton.rpc import codec
from baton.rpc.gen import encode_pb2, encode_pb2_grpc, prefill_pb2
from baton.rpc.server import RunningServer, ServerAuth, start_server
from baton.transfer.digest import page_digest
from baton.worker.media.embedding_puller import EmbeddingLost
from tests.fuzz.grpc_messages import FUZZ, arbitrary_message, corrupted
from tests.unit.encode.encode_world import (
    FINGERPRINT,
    INCARNATION,
    NUM_ROWS,
    TIMEOUT_S,
    WIDE,
    EncodeWorld,
    embedding_of,
    encode_world,
    header,
    value_of,
)

FILE = b"one picture"
CALL_S = 2.0
UNHANDLED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED}
MALICIOUS = Incarnation(0xCC)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def _bytes(message: bytes) -> bytes:
    return message


GOOD_PULL = encode_pb2.PullEmbeddingRequest(
    incarnation=INCARNATION, identity=header(FILE).identity, salt="s", fingerprint=FINGERPRINT, deadline_s=CALL_S
)
GOOD_PUT = prefill_pb2.PutMediaRequest(header=header(FILE))


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[EncodeWorld, Run]]:
    """An encode worker that holds `FILE`, and what runs a coroutine in its loop."""
    with asyncio.Runner() as runner:
        entered = encode_world()
        w = runner.run(entered.__aenter__())
        runner.run(w.put(FILE))
        yield w, runner.run
        runner.run(entered.__aexit__(None, None, None))


async def pull_raw(w: EncodeWorld, request: bytes) -> int:
    """A pull with these bytes: the number of its messages. Raises `AioRpcError`."""
    channel = w.channels.get(w.record.address, w.record.incarnation)
    call = channel.unary_stream("/baton.v1.Encode/PullEmbedding", _bytes, encode_pb2.EmbeddingPart.FromString)
    return len([part async for part in call(request, timeout=CALL_S)])


async def put_raw(w: EncodeWorld, requests: list[bytes]) -> prefill_pb2.PutMediaResponse:
    channel = w.channels.get(w.record.address, w.record.incarnation)
    call = channel.stream_unary("/baton.v1.Encode/PutMedia", _bytes, prefill_pb2.PutMediaResponse.FromString)
    reply: prefill_pb2.PutMediaResponse = await call(iter(requests), timeout=CALL_S)
    return reply


def check_error(error: grpc.aio.AioRpcError) -> None:
    """The worker has meant it: a status with a code of ours that is no bug."""
    codes = dict(error.trailing_metadata() or ())
    assert error.code() not in UNHANDLED, error
    named = from_code(str(codes.get(codec.CODE_METADATA_KEY, "")), "")
    assert not isinstance(named, Broken), error


async def check_alive(w: EncodeWorld) -> None:
    """A right pull gets its embedding, and soon nothing is held: a caller may see the end of its call before."""
    assert await pull_raw(w, GOOD_PULL.SerializeToString()) == 2
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if w.servicer.num_pulls == 0 and w.loop.num_requests == 0:
                return
            await asyncio.sleep(0.001)


async def attempt(w: EncodeWorld, call: Coroutine[Any, Any, Any]) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        check_error(error)
    await check_alive(w)


PULL_BYTES = st.one_of(
    arbitrary_message(encode_pb2.PullEmbeddingRequest.DESCRIPTOR).map(lambda message: message.SerializeToString()),
    corrupted(GOOD_PULL.SerializeToString()),
)
PUT_BYTES = st.one_of(
    arbitrary_message(prefill_pb2.PutMediaRequest.DESCRIPTOR).map(lambda message: message.SerializeToString()),
    corrupted(GOOD_PUT.SerializeToString()),
)


@FUZZ
@given(request=PULL_BYTES)
def test_any_request_for_an_embedding_ends_and_keeps_nothing(world: tuple[EncodeWorld, Run], request: bytes):
    w, run = world
    run(attempt(w, pull_raw(w, request)))


@settings(FUZZ, max_examples=40)
@given(requests=st.lists(PUT_BYTES, min_size=1, max_size=3))
def test_any_upload_ends_and_keeps_nothing(world: tuple[EncodeWorld, Run], requests: list[bytes]):
    w, run = world
    run(attempt(w, put_raw(w, requests)))


class MaliciousEncoder(encode_pb2_grpc.EncodeServicer):
    """Sends `parts`, then `last` for ever, or nothing if it `hangs`."""

    def __init__(self) -> None:
        self.parts: list[encode_pb2.EmbeddingPart] = []
        self.last: encode_pb2.EmbeddingPart | None = None
        self.hangs = False
        self.num_calls = 0
        self.ended = asyncio.Event()
        """The latest call has ended here."""
        self.num_sent = 0
        """Times that `last` was sent."""

    def will_send(
        self, parts: list[encode_pb2.EmbeddingPart], last: encode_pb2.EmbeddingPart | None = None, hangs: bool = False
    ) -> None:
        self.parts, self.last, self.hangs, self.num_sent = parts, last, hangs, 0

    async def PullEmbedding(self, request: Any, context: Any) -> AsyncGenerator[encode_pb2.EmbeddingPart, None]:
        self.num_calls += 1
        self.ended.clear()
        try:
            for part in self.parts:
                yield part
            while self.last is not None:
                self.num_sent += 1
                yield self.last
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            self.ended.set()


def right_parts() -> list[encode_pb2.EmbeddingPart]:
    """What a right encode worker sends for `FILE`: a header and three parts."""
    data = WIDE.to_bytes(embedding_of(value_of(FILE), WIDE)).data
    first = encode_pb2.EmbeddingHeader(num_bytes=len(data), num_rows=NUM_ROWS, digests=part_digests(data))
    return [
        encode_pb2.EmbeddingPart(header=first),
        *(encode_pb2.EmbeddingPart(data=bytes(p)) for p in split_parts(data)),
    ]


RIGHT = right_parts()


@pytest.fixture(scope="module")
def malicious(world: tuple[EncodeWorld, Run]) -> Iterator[MaliciousEncoder]:
    """Announced beside the right worker."""
    w, run = world
    servicer = MaliciousEncoder()

    async def start() -> RunningServer:
        auth = ServerAuth(MALICIOUS, OPEN_CLUSTER)
        server = await start_server(
            "127.0.0.1", 0, lambda to: encode_pb2_grpc.add_EncodeServicer_to_server(servicer, to), auth
        )
        address, id = f"127.0.0.1:{server.port}", WorkerId("malicious")
        await w.registry.announce(WorkerRecord(id, WorkerRole.ENCODE, MALICIOUS, address, "m", "", 0, 100, 100))
        return server

    server = run(start())
    yield servicer
    run(server.stop(0.0))


async def pull(w: EncodeWorld, malicious: MaliciousEncoder, timeout_s: float = TIMEOUT_S) -> str:
    """Pulls from the malicious worker. Why the embedding is lost; "" if it came, and then bit for bit.

    Either way the worker has been asked, and its call ends.
    """
    room: list[None] = []
    named = header(FILE, source=MALICIOUS)
    named.source.worker_id = "malicious"
    num_calls, why = malicious.num_calls, ""
    try:
        found = await w.puller(WIDE).pull(named, timeout_s, lambda: room.append(None))
    except EmbeddingLost as error:
        why = str(error)
    else:
        expected = embedding_of(value_of(FILE), WIDE)
        assert torch.equal(found.embedding.rows, expected.rows)
        assert torch.equal(found.embedding.deep[0], expected.deep[0])
        assert (found.num_rows, found.grid, len(room)) == (NUM_ROWS, None, 1)
    assert malicious.num_calls == num_calls + 1, why
    async with asyncio.timeout(TIMEOUT_S):
        await malicious.ended.wait()
    return why


async def pull_right(w: EncodeWorld, malicious: MaliciousEncoder) -> None:
    """What came before harms no later pull from the same worker, on the same channel."""
    malicious.will_send(RIGHT)
    assert await pull(w, malicious) == ""


async def pull_parts(w: EncodeWorld, malicious: MaliciousEncoder, parts: list[encode_pb2.EmbeddingPart]) -> None:
    malicious.will_send(parts)
    why = await pull(w, malicious)
    assert parts != RIGHT or not why, why
    await pull_right(w, malicious)


NUM_DATA = len(RIGHT) - 1
PLACES = st.integers(0, NUM_DATA)
DATA_PLACES = st.permutations(range(1, NUM_DATA + 1)) | st.lists(st.integers(1, NUM_DATA), max_size=6)
MADE_UP = arbitrary_message(encode_pb2.EmbeddingPart.DESCRIPTOR)


def lying(**lies: Any) -> encode_pb2.EmbeddingPart:
    """The right header but for these fields."""
    right = RIGHT[0].header
    truth: dict[str, Any] = {"num_bytes": right.num_bytes, "num_rows": right.num_rows, "digests": [*right.digests]}
    return encode_pb2.EmbeddingPart(header=encode_pb2.EmbeddingHeader(**(truth | lies)))


DIGESTS = [*RIGHT[0].header.digests]
LYING_HEADERS = st.one_of(
    st.sampled_from([0, 1, PART_BYTES, RIGHT[0].header.num_bytes - 1, 2**63]).map(lambda lie: lying(num_bytes=lie)),
    st.sampled_from([0, NUM_ROWS - 1, 2**32 - 1]).map(lambda lie: lying(num_rows=lie)),
    st.sampled_from([(1, 5), (0, 1), (1, 0)]).map(lambda lie: lying(grid_height=lie[0], grid_width=lie[1])),
    st.sampled_from([[], DIGESTS[:2], DIGESTS[::-1], [*DIGESTS, 0]]).map(lambda lie: lying(digests=lie)),
)


@settings(FUZZ, max_examples=100)
@given(
    places=st.one_of(
        st.just([*range(NUM_DATA + 1)]), DATA_PLACES.map(lambda places: [0, *places]), st.lists(PLACES, max_size=6)
    ),
    first=st.just(RIGHT[0]) | LYING_HEADERS,
    made_up=st.none() | st.tuples(st.integers(0, 6), MADE_UP),
)
def test_an_embedding_is_the_announced_one_or_lost(
    world: tuple[EncodeWorld, Run],
    malicious: MaliciousEncoder,
    places: list[int],
    first: encode_pb2.EmbeddingPart,
    made_up: tuple[int, Any] | None,
):
    """Parts that are dropped, doubled, reordered or made up, behind headers that lie. `pull` compares what comes."""
    w, run = world
    parts = [RIGHT[place] if place else first for place in places]
    if made_up is not None:
        parts.insert(*made_up)
    run(pull_parts(w, malicious, parts))


@FUZZ
@given(place=PLACES, data=st.data())
def test_a_damaged_embedding_is_the_announced_one_or_lost(
    world: tuple[EncodeWorld, Run], malicious: MaliciousEncoder, place: int, data: st.DataObject
):
    w, run = world
    parts = [*RIGHT]
    damaged = data.draw(corrupted(parts[place].SerializeToString()))
    with contextlib.suppress(DecodeError):
        parts[place] = encode_pb2.EmbeddingPart.FromString(damaged)
    run(pull_parts(w, malicious, parts))


ZEROS = encode_pb2.EmbeddingPart(data=b"\0" * PART_BYTES)


@pytest.mark.parametrize("last", [ZEROS, encode_pb2.EmbeddingPart(data=b""), encode_pb2.EmbeddingPart(), RIGHT[0]])
def test_an_embedding_without_end_is_left_at_once(
    world: tuple[EncodeWorld, Run], malicious: MaliciousEncoder, last: encode_pb2.EmbeddingPart
):
    w, run = world
    malicious.will_send(RIGHT, last)
    assert run(pull(w, malicious)) == "a part has another length than announced"
    if last is ZEROS:
        assert malicious.num_sent < 64  # what gRPC's windows take before the reader cancels
    run(pull_right(w, malicious))


def test_no_more_is_read_than_announced_though_it_has_its_digest(
    world: tuple[EncodeWorld, Run], malicious: MaliciousEncoder
):
    w, run = world
    first = lying(digests=[*DIGESTS[:-1], page_digest(memoryview(ZEROS.data))])
    malicious.will_send([first, *RIGHT[1:-1]], ZEROS)
    assert run(pull(w, malicious)) == "a part has another length than announced"
    run(pull_right(w, malicious))


def test_an_embedding_that_never_comes_ends_with_its_time(world: tuple[EncodeWorld, Run], malicious: MaliciousEncoder):
    w, run = world
    malicious.will_send(RIGHT[:2], hangs=True)
    assert run(pull(w, malicious, 2.0))
    run(pull_right(w, malicious))
