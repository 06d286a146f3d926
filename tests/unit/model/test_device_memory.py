"""Pages on a device: bytes are returned only after their copy, and the scratch page belongs to no request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.request import SamplingParams
from baton.engine.batch import Batch, Row, SampleSpec
from baton.engine.runner import ModelRunner
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.kv.memory import MemoryKind, PageMemory, PoolMemory
from baton.model.device_memory import DeviceMemory
from baton.model.linears.packing import WeightLayout
from baton.model.loading.loader import load_model
from baton.model.storage import PageStorage
from baton.transfer.base import MemoryRegion, Pull, PullOutcome, SourceInfo, region_of
from baton.transfer.digest import READ_BYTES, digest_pages, mismatches
from baton.transfer.fake import FakeFabric, FakePuller, FakeSource
from tests import tiny_models
from tests.staged_memory import DeferredCopyStream, staged_memory
from tests.unit.transfer.rigs import EventLog, page_ids

PAGE_BYTES = 4096


@pytest.fixture(params=["host", "device"])
def memory(request) -> PoolMemory:
    return PageMemory(6, PAGE_BYTES) if request.param == "host" else staged_memory(6, PAGE_BYTES)


def test_written_pages_are_read_back(memory):
    contents = [os.urandom(PAGE_BYTES) for _ in range(3)]
    memory.write([4, 0, 5], [memoryview(content) for content in contents])
    assert [bytes(page) for page in memory.read([5, 1, 4, 0])] == [contents[2], bytes(PAGE_BYTES), *contents[:2]]


def test_empty_reads_and_writes(memory):
    memory.write([], [])
    assert memory.read([]) == []


@pytest.mark.parametrize("page", [-1, 6])
def test_a_page_outside_the_pool_is_refused(memory, page):
    with pytest.raises(IndexError):
        memory.read([0, page])
    with pytest.raises(IndexError):
        memory.write([page], [memoryview(bytes(PAGE_BYTES))])


def test_contents_of_another_size_or_number_are_refused(memory):
    with pytest.raises(ValueError, match="different structures"):
        memory.write([0], [memoryview(bytes(PAGE_BYTES - 1))])
    with pytest.raises(ValueError, match="argument"):
        memory.write([0, 1], [memoryview(bytes(PAGE_BYTES))])


def test_digests_do_not_depend_on_the_kind_of_memory(memory):
    contents = [memoryview(os.urandom(PAGE_BYTES)) for _ in range(6)]
    other = PageMemory(6, PAGE_BYTES)
    for pool in (memory, other):
        pool.write(range(6), contents)
    digests = digest_pages(memory, page_ids([3, 1, 5]))
    assert digests == digest_pages(other, page_ids([3, 1, 5]))
    memory.write([1], [contents[2]])
    assert mismatches(memory, page_ids([3, 1, 5]), digests) == [1]


def test_digests_read_a_few_pages_at_a_time():
    copy_stream = DeferredCopyStream()
    geometry = KVGeometry.of_layers((LayerGeometry(1, 64 * 1024, 64 * 1024),), "float32", 16)
    storage = PageStorage.allocate(geometry, 3)
    memory = DeviceMemory(storage, copy_stream)
    assert memory.page_bytes == READ_BYTES // 2
    digest_pages(memory, page_ids([0, 1, 2]))
    assert copy_stream.num_waits == 2


def test_a_region_describes_the_pool():
    host, device = PageMemory(6, PAGE_BYTES), staged_memory(6, PAGE_BYTES, MemoryKind.VRAM)
    assert region_of(host) == MemoryRegion(host.address, 6, PAGE_BYTES, 0, MemoryKind.DRAM)
    assert region_of(device) == MemoryRegion(device.address, 6, PAGE_BYTES, 0, MemoryKind.VRAM)


def test_the_scratch_page_is_not_part_of_the_pool():
    geometry = KVGeometry.of_layers((LayerGeometry(2, 8, 8),), "float32", 4)
    storage = PageStorage.allocate(geometry, 5, has_scratch=True)
    assert (storage.num_pages, storage.scratch_page) == (5, 5)
    scratch = torch.tensor([storage.scratch_page])
    ones = torch.ones(1, 2, 8)
    storage.write(0, scratch, torch.tensor([0]), ones, ones)
    assert storage.keys(0)[5].any()
    assert storage.page_bytes().shape == (5, geometry.page_bytes)
    assert not storage.page_bytes().any()
    assert PageStorage.allocate(geometry, 5).scratch_page is None


def test_a_request_continues_on_pages_from_another_device(tmp_path: Path):
    """A prompt's pages are computed in one pool, announced by digests, and pulled into another pool behind copies."""
    model = load_model(tiny_models.save_random_model("llama", tmp_path), page_size=8, layout=WeightLayout.PLAIN)
    prompt = [(7 * n) % tiny_models.VOCAB_SIZE for n in range(29)]
    remote, local = [6, 2, 9, 4], [1, 8, 3, 5]
    sides = [PageStorage.allocate(model.geometry, 10, has_scratch=True) for _ in range(2)]
    prefill, decode = (ModelRunner(model, storage) for storage in sides)
    source, sink = (DeviceMemory(storage, DeferredCopyStream()) for storage in sides)

    def step(runner: ModelRunner, tokens: list[int], start: int, pages: list[int]) -> int:
        spec = SampleSpec(SamplingParams(temperature=0.0), tokens, len(prompt))
        row = Row(AttemptId(RequestId("r"), 1), tokens[start:], start, page_ids(pages), spec)
        ((sampled,),) = runner.run(Batch((row,))).sampled
        return sampled.token

    tokens = [*prompt, step(prefill, prompt, 0, remote)]
    fabric, events = FakeFabric(), EventLog()
    offered = FakeSource(fabric, WorkerId("p"), Incarnation(1), source)
    address = (source.address, source.num_pages, source.page_bytes)
    info = SourceInfo(WorkerId("p"), Incarnation(1), "", "fake", offered.metadata(), *address)
    puller = FakePuller(fabric, sink, events)
    puller.connect(info)
    digests = digest_pages(source, page_ids(remote))
    pull = Pull(1, WorkerId("p"), page_ids(remote), page_ids(local), digests, 10.0)
    puller.submit(pull)
    assert events.terminal(pull).outcome is PullOutcome.DONE
    puller.close()
    alone = list(tokens)
    for _ in range(3):
        tokens.append(step(decode, tokens, len(tokens) - 1, local))
        alone.append(step(prefill, alone, len(alone) - 1, remote))
    assert tokens == alone
