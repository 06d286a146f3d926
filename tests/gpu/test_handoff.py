"""Pages in GPU memory move over NIXL and over the stream: between devices, to a host, and from a host."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from baton.domain.ids import Incarnation, WorkerId
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.kv.memory import MemoryKind, PageMemory, PoolMemory
from baton.model.device_memory import CudaCopyStream, DeviceMemory
from baton.model.storage import PageStorage
from baton.transfer.base import Pull, PullOutcome, SourceInfo
from baton.transfer.digest import digest_pages
from baton.transfer.nixl import NixlPuller, NixlSource
from baton.transfer.nixl_agent import nixl_available
from tests.gpu.marks import needs_gpu
from tests.unit.transfer.rigs import EventLog, page_ids

pytestmark = [*needs_gpu, pytest.mark.skipif(nixl_available() is not None, reason=f"NIXL: {nixl_available()}")]

GEOMETRY = KVGeometry.of_layers((LayerGeometry(8, 128, 128),) * 2, "bfloat16", 16)
NUM_PAGES = 64
PREFILL = WorkerId("prefill-0")


def make(kind: MemoryKind) -> PoolMemory:
    if kind is MemoryKind.DRAM:
        return PageMemory(NUM_PAGES, GEOMETRY.page_bytes)
    storage = PageStorage.allocate(GEOMETRY, NUM_PAGES, "cuda", has_scratch=True)
    return DeviceMemory(storage, CudaCopyStream(storage.device))


def content(page: int) -> bytes:
    return random.Random(page).randbytes(GEOMETRY.page_bytes)


def serve(pipe: Connection, kind: MemoryKind) -> None:
    """Serves a filled source in a process of its own until it receives a message."""
    memory = make(kind)
    memory.write(range(NUM_PAGES), [memoryview(content(page)) for page in range(NUM_PAGES)])
    source = NixlSource(PREFILL, Incarnation(1), memory)
    info = SourceInfo(
        PREFILL, Incarnation(1), "", "nixl", source.metadata(), memory.address, NUM_PAGES, memory.page_bytes
    )
    pipe.send((info, digest_pages(memory, page_ids(range(NUM_PAGES)))))
    pipe.recv()
    source.close()
    pipe.send(None)


@pytest.fixture(params=list(MemoryKind))
def source(request: pytest.FixtureRequest) -> Iterator[tuple[SourceInfo, tuple[int, ...]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, request.param), daemon=True)
    process.start()
    try:
        assert ours.poll(120.0), "the source process is silent"
        yield ours.recv()
        ours.send(None)
        assert ours.poll(30.0)
    finally:
        process.join(30.0)
        process.kill()


@pytest.mark.parametrize("here", list(MemoryKind))
def test_pages_are_read_from_and_into_either_memory(source: tuple[SourceInfo, tuple[int, ...]], here: MemoryKind):
    info, digests = source
    memory, events = make(here), EventLog()
    puller = NixlPuller(WorkerId("decode-0"), Incarnation(2), memory, events)
    try:
        puller.connect(info)
        for number in range(3):
            remote = page_ids(random.Random(number).sample(range(NUM_PAGES), NUM_PAGES))
            local = page_ids(random.Random(-number - 1).sample(range(NUM_PAGES), NUM_PAGES))
            pull = Pull(number, PREFILL, remote, local, [digests[page] for page in remote], 30.0)
            puller.submit(pull)
            event = events.terminal(pull)
            assert (event.outcome, event.reason) == (PullOutcome.DONE, "")
            assert [bytes(page) for page in memory.read(local)] == [content(page) for page in remote]
    finally:
        puller.close()


def test_kernels_and_copies_see_each_others_writes() -> None:
    storage = PageStorage.allocate(GEOMETRY, NUM_PAGES, "cuda")
    memory = DeviceMemory(storage, CudaCopyStream(storage.device))
    assert memory.kind is MemoryKind.VRAM
    data = os.urandom(memory.page_bytes)
    memory.write([7], [memoryview(data)])
    total = storage.page_bytes()[7].to(torch.int64).sum()
    assert total.item() == sum(data)
    storage.clear(torch.tensor([7], device="cuda"))
    storage.synchronize()
    assert bytes(memory.read([7])[0]) == bytes(memory.page_bytes)
