"""Embeddings over NIXL: they come bit for bit, or by the stream, or the source is lost. Pages are never lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.rpc.gen import encode_pb2
from baton.services.encode.embedding_exports import EmbeddingExports, OpenedEmbedding
from baton.telemetry import metrics
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.nixl import NixlPuller
from baton.transfer.nixl_agent import nixl_available
from baton.transfer.nixl_mover import TCP_PATH
from baton.worker.media.embedding_pages import NUM_PAGES, PAGE_BYTES, EmbeddingPages
from baton.worker.media.embedding_puller import EmbeddingLost, EmbeddingPuller
from baton.worker.media.embedding_reader import EmbeddingReader, ReadFailed
from tests.unit.encode.encode_world import (
    FINGERPRINT,
    INCARNATION,
    TIMEOUT_S,
    WIDE,
    EncodeWorld,
    embedding_of,
    encode_world,
    header,
    value_of,
)

pytestmark = pytest.mark.skipif(nixl_available() is not None, reason="NIXL is not installed")

FILE, OTHER = b"one picture", b"another picture"
SECRET = ClusterTrust(secrets.token_bytes(32))


def moved(transport: str) -> float:
    """Bytes of embeddings that came over a transport in this process."""
    return metrics.EMBEDDING_BYTES_TOTAL.labels(transport)._value.get()


def damaged() -> float:
    return metrics.INTEGRITY_FAILURES_TOTAL.labels("embedding")._value.get()


def ended() -> tuple[float, float]:
    """Pulls that ended in this process's encode worker: exported, and failed."""
    exported, failed = (metrics.MEDIA_TOTAL.labels(outcome)._value.get() for outcome in ("exported", "pull_failed"))
    return exported, failed


@dataclass
class LinkedWorld:
    """A puller whose first embedding has come over the stream, and that is linked since."""

    encode: EncodeWorld
    puller: EmbeddingPuller
    reader: EmbeddingReader

    @property
    def exports(self) -> EmbeddingExports:
        exports = self.encode.servicer.exports
        assert exports is not None
        return exports

    async def pull(self, data: bytes) -> None:
        """Pulls and compares."""
        found = await self.puller.pull(header(data, source=INCARNATION), TIMEOUT_S, lambda: None)
        expected = embedding_of(value_of(data), WIDE)
        assert torch.equal(found.embedding.rows, expected.rows)
        assert torch.equal(found.embedding.deep[0], expected.deep[0])

    async def wait_free(self) -> None:
        """Waits until no page is taken on either side: the source sees the end of a call later than its caller."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if self.reader.num_free_pages == self.exports._pages.num_free == NUM_PAGES:
                    return
                await asyncio.sleep(0.001)


@asynccontextmanager
async def linked_world(trust: ClusterTrust = OPEN_CLUSTER) -> AsyncIterator[LinkedWorld]:
    async with encode_world(WIDE, trust=trust) as w:
        signed = replace(w.record, announcement=1)
        await w.registry.announce(replace(signed, signature=trust.sign(signed)))
        puller, reader = w.nixl_puller(WIDE)
        made = LinkedWorld(w, puller, reader)
        try:
            for data in (FILE, OTHER):
                await w.put(data)
            before = moved("nixl")
            await made.pull(FILE)
            assert moved("nixl") == before, "the first one comes over the stream"
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    if reader.is_linked(w.record):
                        break
                    await asyncio.sleep(0.001)
            yield made
        finally:
            await reader.close()


@pytest.mark.parametrize("trust", [OPEN_CLUSTER, SECRET], ids=["open", "secret"])
async def test_a_linked_puller_reads_bit_for_bit(trust: ClusterTrust):
    async with linked_world(trust) as w:
        before, streamed, (exported, failed) = moved("nixl"), moved("stream"), ended()
        for data in (OTHER, FILE, OTHER):
            await w.pull(data)
        assert moved("nixl") - before == 3 * 5 * WIDE.row_bytes
        assert moved("stream") == streamed
        assert w.reader.transport == "nixl"
        await w.wait_free()
        assert ended() == (exported + 3, failed)


Harm = Callable[[EmbeddingExports, OpenedEmbedding], OpenedEmbedding]


def flip(exports: EmbeddingExports, opened: OpenedEmbedding) -> OpenedEmbedding:
    exports._pages.memory.page(opened.pages[-1])[1] ^= 0x10
    return opened


def swap(exports: EmbeddingExports, opened: OpenedEmbedding) -> OpenedEmbedding:
    first, *rest, last = opened.pages
    return replace(opened, pages=[last, *rest, first])


def shorten(exports: EmbeddingExports, opened: OpenedEmbedding) -> OpenedEmbedding:
    return replace(opened, pages=opened.pages[:-1], tags=opened.tags[:-1])


def outside(exports: EmbeddingExports, opened: OpenedEmbedding) -> OpenedEmbedding:
    return replace(opened, pages=[PageId(NUM_PAGES + 5), *opened.pages[1:]])


def untagged(exports: EmbeddingExports, opened: OpenedEmbedding) -> OpenedEmbedding:
    return replace(opened, tags=[])


@pytest.mark.parametrize(
    ("trust", "harm", "is_counted"),
    [
        (OPEN_CLUSTER, flip, True),
        (OPEN_CLUSTER, swap, True),
        (OPEN_CLUSTER, shorten, False),
        (OPEN_CLUSTER, outside, False),
        (SECRET, flip, True),
        (SECRET, untagged, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_what_is_not_as_it_was_made_is_read_over_the_stream(
    trust: ClusterTrust, harm: Harm, is_counted: bool, monkeypatch: pytest.MonkeyPatch
):
    async with linked_world(trust) as w:
        real, harmed = EmbeddingExports.open, list[OpenedEmbedding]()

        def open(exports: EmbeddingExports, identity: bytes, rows: ExportedEmbedding) -> OpenedEmbedding | None:
            opened = real(exports, identity, rows)
            assert opened is not None
            harmed.append(opened)
            return harm(exports, opened)

        monkeypatch.setattr(EmbeddingExports, "open", open)
        monkeypatch.setattr(EmbeddingExports, "close", lambda exports, _: exports._pages.release(harmed[-1].pages))
        before, streamed, (exported, failed) = damaged(), moved("stream"), ended()
        await w.pull(OTHER)
        assert len(harmed) == 1
        assert moved("stream") - streamed == 5 * WIDE.row_bytes
        assert (damaged() > before) is is_counted
        await w.wait_free()
        assert ended() == (exported + 1, failed + 1), "one embedding, in the second pull"


@pytest.mark.parametrize("says_so", [True, False])
async def test_a_reader_that_leaves_has_an_embedding_only_if_it_said_so(says_so: bool):
    """It ends its call right behind its word, before the source has noticed that."""
    async with linked_world() as w:
        await w.wait_free()
        exported, failed = ended()
        stub, name = w.encode.encoder, header(OTHER)
        request = encode_pb2.PullEmbeddingRequest(
            incarnation=INCARNATION, identity=name.identity, salt="s", fingerprint=FINGERPRINT, is_linked=True
        )
        call = stub.PullEmbedding(request, timeout=TIMEOUT_S)
        first = await anext(aiter(call))
        assert first.header.pages
        if says_so:
            for pull in (first.header.pull + 1, first.header.pull, first.header.pull):
                await stub.CommitPull(
                    encode_pb2.CommitPullRequest(incarnation=INCARNATION, pull=pull), timeout=TIMEOUT_S
                )
        call.cancel()
        await w.wait_free()
        assert ended() == (exported + says_so, failed + (not says_so))


class _EarlierCall:
    """A pull of a version without `CommitPull`: its header has no number."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    async def __aiter__(self) -> AsyncIterator[encode_pb2.EmbeddingPart]:
        async for part in self._call:
            if part.HasField("header"):
                part.header.pull = 0
            yield part


async def test_a_source_of_an_earlier_version_is_read():
    async with linked_world() as w:
        real, before, (exported, failed) = w.encode.encoder.PullEmbedding, moved("nixl"), ended()
        w.encode.encoder.PullEmbedding = lambda *args, **more: _EarlierCall(real(*args, **more))
        await w.pull(OTHER)
        assert moved("nixl") - before == 5 * WIDE.row_bytes
        await w.wait_free()
        assert ended() == (exported, failed + 1)


async def test_without_room_for_a_copy_the_data_follows(monkeypatch: pytest.MonkeyPatch):
    async with linked_world() as w:
        taken = w.exports._pages.take((NUM_PAGES - 1) * PAGE_BYTES)
        assert taken is not None
        before = moved("stream")
        await w.pull(OTHER)
        assert moved("stream") - before == 5 * WIDE.row_bytes
        w.exports._pages.release(taken)
        before = moved("nixl")
        await w.pull(OTHER)
        assert moved("nixl") > before


@pytest.mark.parametrize("field", ["worker_id", "incarnation", "metadata", "page_bytes"])
async def test_memory_of_another_process_is_not_linked(field: str):
    async with encode_world(WIDE) as w:
        puller, reader = w.nixl_puller(WIDE)
        assert w.servicer.exports is not None
        info = w.servicer.exports.info
        changes: dict[str, Any] = {"worker_id": "other", "incarnation": 1, "metadata": b"nonsense", "page_bytes": 7}
        setattr(info, field, changes[field])
        world = LinkedWorld(w, puller, reader)
        await w.put(FILE)
        await world.pull(FILE)
        await asyncio.gather(*reader._tasks)
        assert not reader.is_linked(w.record)
        before = moved("nixl")
        await world.pull(FILE)
        assert moved("nixl") == before
        assert not reader.wants_source(w.record), "it is not asked again"
        await reader.close()


async def test_a_source_that_died_is_lost_and_its_pages_are_free():
    async with linked_world() as w:
        await w.pull(OTHER)
        await w.encode.server.stop()
        with pytest.raises(EmbeddingLost):
            await w.pull(FILE)
        await w.wait_free()


@pytest.mark.parametrize("path", [TCP_PATH, "nixl/ucx (cma)"])
async def test_a_source_that_is_reached_by_tcp_is_left_to_the_stream(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(NixlPuller, "path", lambda puller, source: path)
    async with encode_world(WIDE) as w:
        puller, reader = w.nixl_puller(WIDE)
        await w.put(FILE)
        await LinkedWorld(w, puller, reader).pull(FILE)
        await asyncio.gather(*reader._tasks)
        assert reader.is_linked(w.record) is (path != TCP_PATH)
        assert reader.num_free_pages == NUM_PAGES
        await reader.close()


class _StuckPuller:
    """A transfer thread whose reads never end until they are told to."""

    transport = "nixl"

    def __init__(self) -> None:
        self.pulls: list[tuple[Pull, Callable[[PullEvent], None]]] = []

    def submit_to(self, pull: Pull, on_event: Callable[[PullEvent], None]) -> None:
        self.pulls.append((pull, on_event))

    def end(self, outcome: PullOutcome) -> None:
        pull, on_event = self.pulls[0]
        on_event(PullEvent(pull, outcome, 0, 0.0))

    def disconnect(self, source: WorkerId) -> None: ...

    def path(self, source: WorkerId) -> str:
        return ""

    def close(self) -> None: ...


def stuck_reader(w: EncodeWorld) -> tuple[EmbeddingReader, _StuckPuller]:
    reader, stuck = EmbeddingReader(WorkerId("prefill-0"), Incarnation(5), OPEN_CLUSTER), _StuckPuller()
    reader._puller = stuck  # type: ignore[assignment]
    reader._linked[w.record.id] = w.record.incarnation
    return reader, stuck


@pytest.mark.parametrize("outcome", [PullOutcome.DONE, PullOutcome.FAILED])
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_pages_of_a_late_read_stay_taken_until_it_ends(outcome: PullOutcome, is_cancelled: bool):
    """Bytes may arrive until then: into no other embedding."""
    async with encode_world() as w:
        reader, stuck = stuck_reader(w)
        reading = asyncio.create_task(reader.read(w.record, [0, 1], None, 2 * PAGE_BYTES, TIMEOUT_S))
        await asyncio.sleep(0)
        if is_cancelled:
            reading.cancel()
        else:
            stuck.end(PullOutcome.LATE)
        with pytest.raises(asyncio.CancelledError if is_cancelled else ReadFailed):
            await reading
        assert reader.num_free_pages == NUM_PAGES - 2
        stuck.end(outcome)
        await asyncio.sleep(0)
        assert reader.num_free_pages == NUM_PAGES
        assert reader.is_linked(w.record) is (is_cancelled and outcome is PullOutcome.DONE)
        await reader.close()


async def test_a_pull_goes_on_over_the_stream_behind_a_late_read():
    async with encode_world() as w:
        reader, stuck = stuck_reader(w)
        puller, real = w.nixl_puller()
        puller.reader = reader
        await w.put(FILE)
        pulling = asyncio.create_task(puller.pull(header(FILE, source=INCARNATION), TIMEOUT_S, lambda: None))
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if stuck.pulls:
                    break
                await asyncio.sleep(0.001)
        stuck.end(PullOutcome.LATE)
        assert stuck.pulls[0][0].deadline_s < TIMEOUT_S
        assert torch.equal((await pulling).embedding.rows, embedding_of(value_of(FILE)).rows)
        await reader.close()
        await real.close()


def test_pages_are_taken_whole_or_not_at_all():
    pages = EmbeddingPages(4)
    assert pages.take(0) is None
    first, second = pages.take(PAGE_BYTES + 1), pages.take(2 * PAGE_BYTES)
    assert first is not None
    assert second is not None
    assert (len(first), len(second), pages.take(1)) == (2, 2, None)
    assert not {*first} & {*second}
    data = bytes(range(256)) * 257
    pages.fill(first, data)
    assert pages.read(first, len(data)) == data
    pages.release(first)
    assert pages.num_free == 2
