"""Embeddings over real connections: they come bit for bit, or the puller says that the source is lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import torch

from baton.domain.errors import Overloaded
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRole
from baton.engine.media.embedding_format import EmbeddingFormat
from baton.engine.media.exported_embedding import PART_BYTES
from baton.rpc.gen import encode_pb2, prefill_pb2
from baton.services.encode import server as encode_server
from baton.store.store import StoreUnavailable
from baton.worker.media.embedding_puller import EmbeddingLost, EmbeddingPuller
from tests.unit.encode.encode_world import (
    FINGERPRINT,
    FORMAT,
    INCARNATION,
    TIMEOUT_S,
    WIDE,
    EncodeWorld,
    embedding_of,
    encode_world,
    header,
    value_of,
)

FILE = b"one picture"


def no_charge() -> None:
    """For `take_room`: there is room."""


async def pull(w: EncodeWorld, data: bytes = FILE, format: EmbeddingFormat = FORMAT, **more: Any) -> None:
    """Pulls and compares."""
    found = await w.puller(format).pull(header(data, source=INCARNATION, **more), TIMEOUT_S, no_charge)
    expected = embedding_of(value_of(data), format)
    assert torch.equal(found.embedding.rows, expected.rows)
    assert torch.equal(found.embedding.deep[0], expected.deep[0])
    assert (found.num_rows, found.grid) == (5, None)


@pytest.mark.parametrize("format", [FORMAT, WIDE], ids=["one part", "three parts"])
async def test_an_embedding_comes_bit_for_bit_and_is_made_once(format: EmbeddingFormat):
    async with encode_world(format) as w:
        assert (await w.put(FILE)).outcome == prefill_pb2.MEDIA_OUTCOME_HELD
        for _ in range(3):
            await pull(w, format=format)
        assert w.tower.num_images == 1
        assert (5 * WIDE.row_bytes - 1) // PART_BYTES == 2


async def test_a_pull_waits_for_the_tower():
    async with encode_world() as w:
        w.tower.may_go_on.clear()
        await w.put(FILE)
        running = asyncio.create_task(pull(w))
        assert await asyncio.to_thread(w.tower.begun.wait, TIMEOUT_S)
        assert not running.done()
        w.tower.may_go_on.set()
        await running


async def test_another_salt_finds_nothing():
    async with encode_world() as w:
        await w.put(FILE, salt="mine")
        with pytest.raises(EmbeddingLost, match="is not held here"):
            await pull(w, salt="yours")


async def test_bytes_that_changed_at_the_source_are_never_used():
    """The strongest adversary of memory: after the digest, before the pull. The image is encoded anew when it comes."""
    async with encode_world() as w:
        await w.put(FILE)
        await pull(w)
        held = w.store.find(("s", header(FILE).identity))
        assert held is not None
        assert held.rows is not None
        held.rows.data[7] ^= 0x10
        with pytest.raises(EmbeddingLost, match="is not held here"):
            await pull(w)
        await w.put(FILE)
        await pull(w)
        assert w.tower.num_images == 2


def _flip(part: encode_pb2.EmbeddingPart) -> list[encode_pb2.EmbeddingPart]:
    if part.HasField("header"):
        return [part]
    data = bytearray(part.data)
    data[-1] ^= 1
    return [encode_pb2.EmbeddingPart(data=bytes(data))]


def _shorten(part: encode_pb2.EmbeddingPart) -> list[encode_pb2.EmbeddingPart]:
    return [part] if part.HasField("header") else [encode_pb2.EmbeddingPart(data=part.data[:-1])]


def _repeat(part: encode_pb2.EmbeddingPart) -> list[encode_pb2.EmbeddingPart]:
    return [part, part]


def _drop_data(part: encode_pb2.EmbeddingPart) -> list[encode_pb2.EmbeddingPart]:
    return [part] if part.HasField("header") else []


def _drop_header(part: encode_pb2.EmbeddingPart) -> list[encode_pb2.EmbeddingPart]:
    return [] if part.HasField("header") else [part]


def _other_count(part: encode_pb2.EmbeddingPart) -> list[encode_pb2.EmbeddingPart]:
    if part.HasField("header"):
        part.header.num_rows += 1
    return [part]


def _other_grid(part: encode_pb2.EmbeddingPart) -> list[encode_pb2.EmbeddingPart]:
    if part.HasField("header"):
        part.header.grid_height, part.header.grid_width = 5, 1
    return [part]


def _no_digests(part: encode_pb2.EmbeddingPart) -> list[encode_pb2.EmbeddingPart]:
    if part.HasField("header"):
        del part.header.digests[:]
    return [part]


Change = Callable[[encode_pb2.EmbeddingPart], list[encode_pb2.EmbeddingPart]]


class _ChangedCall:
    """A call whose messages a link changes."""

    def __init__(self, call: Any, change: Change) -> None:
        self._call = call
        self._change = change

    async def __aiter__(self) -> AsyncIterator[encode_pb2.EmbeddingPart]:
        async for part in self._call:
            for changed in self._change(part):
                yield changed

    def cancel(self) -> None:
        self._call.cancel()


@pytest.mark.parametrize(
    "change",
    [_flip, _shorten, _repeat, _drop_data, _drop_header, _other_count, _other_grid, _no_digests],
    ids=lambda change: change.__name__,  # equal in every process of the tests
)
async def test_what_changes_on_the_way_is_never_used(change: Change):
    async with encode_world(WIDE) as w:
        await w.put(FILE)
        puller, real = w.puller(WIDE), w.encoder.PullEmbedding
        w.encoder.PullEmbedding = lambda *args, **more: _ChangedCall(real(*args, **more), change)
        with pytest.raises(EmbeddingLost):
            await puller.pull(header(FILE, source=INCARNATION), TIMEOUT_S, no_charge)
        w.encoder.PullEmbedding = real
        await pull(w, format=WIDE)


async def test_embeddings_of_other_weights_are_refused():
    async with encode_world() as w:
        await w.put(FILE)
        with pytest.raises(EmbeddingLost, match="weights or versions differ"):
            await w.puller(fingerprint="g" * 32).pull(header(FILE, source=INCARNATION), TIMEOUT_S, no_charge)


async def test_a_tower_that_fails_loses_its_image_only():
    async with encode_world() as w:
        w.tower.fails = True
        await w.put(FILE)
        with pytest.raises(EmbeddingLost, match="is not held here"):
            await pull(w)
        w.tower.fails = False
        await w.put(b"another")
        await pull(w, b"another")


async def test_a_late_embedding_is_lost_and_its_lease_ends():
    async with encode_world() as w:
        w.tower.may_go_on.clear()
        await w.put(FILE)
        with pytest.raises(EmbeddingLost):
            await w.puller().pull(header(FILE, source=INCARNATION), 0.2, no_charge)
        w.tower.may_go_on.set()
        await pull(w)
        async with asyncio.timeout(TIMEOUT_S):
            while w.loop.num_requests:
                await w.put(FILE)  # a turn of the loop
        item = w.store.find(("s", header(FILE).identity))
        assert item is not None
        assert not item.pins


async def test_only_announced_encode_workers_are_called():
    """An address comes from the registry, so a caller cannot have this worker connect to any other."""
    async with encode_world() as w:
        await w.put(FILE)
        with pytest.raises(EmbeddingLost, match="no encode worker"):
            await w.puller().pull(header(FILE, source=Incarnation(78)), TIMEOUT_S, no_charge)
        other = header(FILE, source=INCARNATION)
        other.source.worker_id = "encode-1"
        with pytest.raises(EmbeddingLost, match="no encode worker"):
            await w.puller().pull(other, TIMEOUT_S, no_charge)
        other.source.incarnation = 79
        no_encoder = replace(w.record, id=WorkerId("encode-1"), incarnation=Incarnation(79), role=WorkerRole.PREFILL)
        await w.registry.announce(no_encoder)
        with pytest.raises(EmbeddingLost, match="no encode worker"):
            await w.puller().pull(other, TIMEOUT_S, no_charge)


async def test_unsigned_workers_are_not_called():
    async with encode_world(trust=ClusterTrust(secrets.token_bytes(32))) as w:
        await w.put(FILE)
        with pytest.raises(EmbeddingLost, match="no encode worker"):
            await pull(w)
        await w.registry.announce(replace(w.record, announcement=1, signature=""))
        signed = replace(w.record, announcement=2)
        await w.registry.announce(replace(signed, signature=w.channels.trust.sign(signed)))
        await pull(w)


async def test_a_registry_that_does_not_answer_is_a_lost_source(monkeypatch: pytest.MonkeyPatch):
    async with encode_world() as w:

        async def workers() -> Any:
            raise StoreUnavailable("away")

        monkeypatch.setattr(w.registry, "workers", workers)
        with pytest.raises(EmbeddingLost, match="away"):
            await pull(w)


async def test_a_source_that_dies_is_lost():
    async with encode_world() as w:
        puller: EmbeddingPuller = w.puller()
        await w.put(FILE)
        await pull(w)
        await w.server.stop()
        with pytest.raises(EmbeddingLost):
            await puller.pull(header(FILE, source=INCARNATION), TIMEOUT_S, no_charge)


async def test_a_source_that_dies_between_parts_is_lost():
    """Behind the first of three parts."""
    async with encode_world(WIDE) as w:
        stopping: list[asyncio.Task[None]] = []

        async def die(part: encode_pb2.EmbeddingPart) -> None:
            if part.HasField("data"):
                stopping.append(asyncio.create_task(w.server.stop()))
                await asyncio.Event().wait()

        await w.put(FILE)
        w.servicer.on_part = die
        with pytest.raises(EmbeddingLost):
            await w.puller(WIDE).pull(header(FILE, source=INCARNATION), TIMEOUT_S, no_charge)
        await asyncio.gather(*stopping)
        assert len(stopping) == 1
        assert w.servicer.num_pulls == 0


async def test_images_that_were_pulled_make_room_at_once():
    """Many more than there is room for, each put twice as by two routers, without a pause."""
    row_bytes = 5 * FORMAT.row_bytes
    async with encode_world(max_bytes=3 * row_bytes) as w:
        for number in range(20):
            data = b"picture %d" % number
            for _ in range(2):
                assert (await w.put(data)).outcome == prefill_pb2.MEDIA_OUTCOME_HELD
                await pull(w, data)
            assert (await w.put(data)).outcome == prefill_pb2.MEDIA_OUTCOME_HELD  # for a prefill worker that has it
        assert (w.tower.num_images, w.store.num_bytes <= 3 * row_bytes) == (20, True)


async def test_an_embedding_of_which_no_tensor_can_be_made_is_lost(monkeypatch: pytest.MonkeyPatch):
    for error in (RuntimeError("no memory on the device"), MemoryError(), ValueError("shape")):
        async with encode_world() as w:
            await w.put(FILE)
            puller = w.puller()
            monkeypatch.setattr(EmbeddingFormat, "from_bytes", Mock(side_effect=error))
            with pytest.raises(EmbeddingLost, match="no tensor"):
                await puller.pull(header(FILE, source=INCARNATION), TIMEOUT_S, no_charge)


async def test_what_room_refuses_ends_the_pull_before_its_bytes():
    def refuse() -> None:
        raise Overloaded("full")

    async with encode_world() as w:
        await w.put(FILE)
        with pytest.raises(Overloaded, match="full"):
            await w.puller().pull(header(FILE, source=INCARNATION), TIMEOUT_S, refuse)
        await pull(w)


async def read(w: EncodeWorld, timeout: float | None, deadline_s: float = TIMEOUT_S) -> int:
    """A pull by hand: its number of messages."""
    request = encode_pb2.PullEmbeddingRequest(
        incarnation=INCARNATION, identity=header(FILE).identity, salt="s", fingerprint=FINGERPRINT,
        deadline_s=deadline_s,
    )  # fmt: skip
    return len([part async for part in w.encoder.PullEmbedding(request, timeout=timeout)])


@pytest.mark.parametrize("timeout", [None, 1000.0])
async def test_a_call_that_would_outlive_its_lease_is_refused(timeout: float | None):
    async with encode_world() as w:
        await w.put(FILE)
        with pytest.raises(grpc.aio.AioRpcError, match="ends within") as refused:
            await read(w, timeout)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await read(w, TIMEOUT_S) == 2


async def test_a_stream_ends_with_its_lease():
    """It is read more slowly than the puller had said."""
    lease_s = 0.2

    async def outlast(part: encode_pb2.EmbeddingPart) -> None:
        await asyncio.sleep(lease_s)

    async with encode_world(WIDE) as w:
        await w.put(FILE)
        await pull(w, format=WIDE)
        w.servicer.on_part = outlast
        with pytest.raises(grpc.aio.AioRpcError, match="not read in time"):
            await read(w, TIMEOUT_S, lease_s)


async def test_open_pulls_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encode_server, "MAX_PULLS", 2)
    async with encode_world() as w:
        w.tower.may_go_on.clear()
        await w.put(FILE)
        waiting = [asyncio.create_task(read(w, TIMEOUT_S)) for _ in range(2)]
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if w.servicer.num_pulls == 2:
                    break
                await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError, match="at once"):
            await read(w, TIMEOUT_S)
        w.tower.may_go_on.set()
        assert await asyncio.gather(*waiting) == [2, 2]
        assert await read(w, TIMEOUT_S) == 2


@pytest.mark.parametrize("identity", [b"", b"short", b"i" * 17])
async def test_a_pull_of_nonsense_is_refused(identity: bytes):
    async with encode_world() as w:
        request = encode_pb2.PullEmbeddingRequest(
            incarnation=INCARNATION, identity=identity, fingerprint=FINGERPRINT, deadline_s=1.0
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [part async for part in w.encoder.PullEmbedding(request, timeout=TIMEOUT_S)]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
