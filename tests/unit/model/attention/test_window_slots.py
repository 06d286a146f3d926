"""Attention over window parts in slots of their own has the bits of attention over whole pages."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.geometry import KVGeometry, LayerGeometry, PageWindow
from baton.kv.memory import PageMemory
from baton.kv.pages import Hold, PagePool
from baton.kv.windows.memory import WindowedMemory
from baton.kv.windows.slots import WindowSlots
from baton.model.attention.base import AttentionBackend, AttentionCall, Segment, StepMetadata, plan_step
from baton.model.attention.native_backend import NativeAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.window_slots import clear_partial_pages, with_window_slots
from baton.model.kernels.library import load_kernels
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels

PAGE_SIZE, NUM_PAGES, NUM_SLOTS = 4, 40, 14
LAYER = LayerGeometry(2, 16, 16)
GEOMETRY = KVGeometry.of_layers((LAYER,) * 3, "float32", PAGE_SIZE).with_window_part(10, (0, 2))
WINDOWS = (10, None, 6)
"""The third layer has a narrower window."""
READ = PageWindow.of(GEOMETRY)
Backend = Callable[[PageStorage], AttentionBackend]


def backends() -> list[Backend]:
    native: list[Backend] = [
        lambda storage, level=level, limit=limit: NativeAttention(load_kernels(level), storage, limit)  # type: ignore[misc]
        for level in kernel_levels()
        for limit in (None, 4)
    ]
    return [TorchAttention, *native]


class Twin:
    """The same pages as a whole, and with window parts in slots; slots that no page has are NaN."""

    def __init__(self, backend: Backend) -> None:
        plain = PageMemory(NUM_PAGES, GEOMETRY.page_bytes, GEOMETRY.part_ends)
        self.memory = WindowedMemory.allocate(NUM_PAGES, NUM_SLOTS, GEOMETRY.part_ends)
        pool = PagePool(NUM_PAGES)
        self.slots: WindowSlots = self.memory.join(pool)
        assert pool.allocate(NUM_PAGES, Hold.LIVE) is not None
        self.storages = [PageStorage.on_memory(GEOMETRY, memory) for memory in (plain, self.memory)]
        self.backends = [backend(storage) for storage in self.storages]
        self.poison()

    def poison(self) -> None:
        for slot in self.slots.free_slots:
            self.memory.windows.page(slot)[:] = b"\xff" * self.memory.windows.page_bytes

    def step(self, segments: list[Segment]) -> None:
        """Writes and attends in all layers, on both sides."""
        num_tokens = sum(segment.num_tokens for segment in segments)
        generator = torch.Generator().manual_seed(num_tokens)
        tokens = [torch.randn(num_tokens, heads, 16, generator=generator) for heads in (4, 2, 2)]
        outputs = []
        for storage, backend in zip(self.storages, self.backends, strict=True):
            step = with_window_slots(plan_step(segments, PAGE_SIZE), storage)
            clear_partial_pages(step, storage)
            backend.begin(step)
            outputs.append([self.attend(layer, storage, backend, step, tokens) for layer in range(3)])
        for layer, (whole, apart) in enumerate(zip(*outputs, strict=True)):
            assert torch.equal(whole, apart), f"layer {layer}"
            assert torch.isfinite(apart).all()

    @staticmethod
    def attend(
        layer: int, storage: PageStorage, backend: AttentionBackend, step: StepMetadata, tokens: list[torch.Tensor]
    ) -> torch.Tensor:
        query, keys, values = tokens
        own = step.of(is_apart=storage.is_apart(layer))
        storage.write(layer, own.token_pages, own.token_slots, keys + layer, values - layer)
        return backend.attend(AttentionCall(layer, query, 0.25, WINDOWS[layer]))


@pytest.mark.parametrize("backend", backends())
def test_rows_and_chunks_have_the_bits_that_they_have_in_whole_pages(backend: Backend):
    """Two sequences in chunks and then token by token, while their windows move on."""
    assert READ is not None
    twin, dice = Twin(backend), random.Random(5)
    tables = [dice.sample(range(NUM_PAGES // 2), 15), dice.sample(range(NUM_PAGES // 2, NUM_PAGES), 15)]
    ends, held = [0, 0], [set[int](), set[int]()]
    for sizes in [(8, 0), (8, 12), (5, 1), (1, 1), (9, 1), *[(1, 1)] * 14]:
        segments: list[Segment] = []
        for number, (table, size) in enumerate(zip(tables, sizes, strict=True)):
            if not size:
                continue
            start, end = ends[number], ends[number] + size
            reach = set(table[READ.first_page(start) : -(-end // PAGE_SIZE)])
            twin.slots.drop([PageId(page) for page in held[number] - reach])
            twin.poison()
            assert twin.slots.take([PageId(page) for page in reach - held[number]])
            held[number], ends[number] = reach, end
            segments.append(Segment(sum(one.num_tokens for one in segments), start, size, table))
        twin.step(segments)


def test_a_page_that_a_step_does_not_fill_is_cleared_with_its_window_part():
    twin = Twin(TorchAttention)
    assert twin.slots.take([PageId(3), PageId(5)])
    twin.step([Segment(0, 0, 6, [3, 5])])
    whole, apart = (
        storage.reached_slots([3, 5], 0, 6)[1] if storage.has_window_slots else [3, 5] for storage in twin.storages
    )
    for layer in (0, 2):
        one, other = twin.storages[0].keys(layer)[whole[1]], twin.storages[1].keys(layer)[apart[1]]
        assert torch.equal(one, other)
        assert not other[..., 2:, :].any()


def test_a_read_of_a_slot_that_was_given_back_is_broken():
    twin = Twin(TorchAttention)
    storage = twin.storages[1]
    assert twin.slots.take([PageId(1), PageId(2), PageId(3)])
    twin.slots.drop([PageId(1)])
    with_window_slots(plan_step([Segment(0, 13, 1, [1, 2, 3, 3])], PAGE_SIZE), storage)
    with pytest.raises(Broken, match="page 1 is read at position 12 without its window part"):
        with_window_slots(plan_step([Segment(0, 12, 1, [1, 2, 3, 3])], PAGE_SIZE), storage)


def test_a_copy_takes_the_window_parts_that_are_there():
    host = PageMemory(4, GEOMETRY.page_bytes, GEOMETRY.part_ends)
    memory = WindowedMemory.allocate(4, 4, GEOMETRY.part_ends)
    pool = PagePool(4)
    slots = memory.join(pool)
    assert pool.allocate(4, Hold.LIVE) is not None
    assert slots.take([PageId(1), PageId(3)])
    memory.write(range(4), [memoryview(random.Random(page).randbytes(GEOMETRY.page_bytes)) for page in range(4)])
    storage = PageStorage.on_memory(GEOMETRY, memory, host)
    before = [bytes(page) for page in memory.read(range(4))]
    storage.copy_to_host([0, 1], [2, 3], slots.slots([PageId(0), PageId(1)]))
    storage.copy_from_host([2, 3], [2, 3], slots.slots([PageId(2), PageId(3)]))
    assert [bytes(page) for page in memory.read(range(4))] == [before[0], before[1], before[0], before[1]]
    storage.copy_to_host([3], [0], (-1,))
    assert bytes(host.page(0)[GEOMETRY.window_start :]) == bytes(GEOMETRY.page_bytes - GEOMETRY.window_start)
