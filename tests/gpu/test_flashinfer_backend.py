"""The CUDA backend against the torch backend on the same pages. Needs a GPU and flashinfer."""

from __future__ import annotations

import random

import pytest
import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention.base import AttentionBackend, AttentionCall, Segment, StepMetadata, plan_step
from baton.model.attention.flashinfer_backend import FlashinferAttention, flashinfer_supports
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.torch_backend import TorchAttention
from baton.model.storage import PageStorage
from tests.gpu.marks import needs_flashinfer

pytestmark = needs_flashinfer

PAGE_SIZE = 16
NUM_PAGES = 200
SHAPE = LayerGeometry(2, 64, 64)


def world(layer: ObservedLayer) -> PageStorage:
    storage = PageStorage.allocate(
        KVGeometry.of_layers((layer.geometry,) * 2, "bfloat16", PAGE_SIZE), NUM_PAGES, "cuda"
    )
    generator = torch.Generator().manual_seed(0)
    for view in (storage.keys(1), storage.values(1)):
        view.copy_(torch.randn(view.shape, generator=generator))
    return storage


def random_step(rng: random.Random, num_rows: int, chunks: bool, more: str = "") -> StepMetadata:
    """Rows of random length on scattered pages; every third is a chunk where `chunks` is set.

    `more`: every sixth of these has "blocks", one of them begun before, or is one of "trees".
    """
    free = rng.sample(range(NUM_PAGES), NUM_PAGES)
    segments, first = [], 0
    for row in range(num_rows):
        num_tokens = rng.randint(2, 40) if chunks and row % 3 == 0 else 1
        start = rng.randint(0, 70)
        pages = [free.pop() for _ in range(ceil_div(start + num_tokens, PAGE_SIZE))]
        blocks: tuple[tuple[int, int], ...] = ()
        parents: tuple[int, ...] = ()
        if num_tokens > 1 and row % 6 == 0 and more == "blocks":
            blocks = ((max(0, start - 5), start + num_tokens // 2), (start + num_tokens // 2, start + num_tokens))
        if num_tokens > 1 and row % 6 == 0 and more == "trees":
            parents = (-1, *(rng.randrange(node) for node in range(1, num_tokens)))
        segments.append(Segment(first, start, num_tokens, pages, blocks, parents))
        first += num_tokens
    return plan_step(segments, PAGE_SIZE, "cuda")


def compare(storage: PageStorage, backend: AttentionBackend, layer: ObservedLayer, step: StepMetadata) -> None:
    query = torch.randn(step.num_tokens, layer.num_heads, 64, generator=torch.Generator().manual_seed(1))
    call = AttentionCall(1, query.to("cuda", torch.bfloat16), layer.scale, layer.window, layer.softcap)
    reference = TorchAttention(storage)
    outputs = []
    for each in (backend, reference):
        each.begin(step)
        outputs.append(each.attend(call).float())
    torch.testing.assert_close(*outputs, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("num_heads", [2, 4, 8, 14])  # CUDA cores below a group of 4, tensor cores from there on
def test_random_steps_agree_with_the_torch_backend(window: int | None, softcap: float | None, num_heads: int) -> None:
    layer = ObservedLayer(SHAPE, num_heads, 0.125, window, softcap, False)
    storage = world(layer)
    assert flashinfer_supports([layer, layer], storage)
    backend = FlashinferAttention([layer, layer], storage)
    rng = random.Random(2)
    for chunks in (True, False, True, False):
        compare(storage, backend, layer, random_step(rng, 12, chunks))


@pytest.mark.parametrize(("more", "window"), [("trees", None), ("blocks", None), ("blocks", 5), ("blocks", 20)])
def test_masks_agree_with_the_torch_backend(more: str, window: int | None) -> None:
    """Also a long prompt behind a cached prefix, whose keys flashinfer splits; then a step without a mask."""
    layer = ObservedLayer(SHAPE, 8, 0.125, window, None, False)
    storage = world(layer)
    backend = FlashinferAttention([layer, layer], storage)
    rng = random.Random(4)
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    parents = (-1, *range(15)) if more == "trees" else ()
    long = Segment(0, 2000, 16 if parents else 600, pages, () if parents else ((1990, 2256), (2300, 2556)), parents)
    steps = [random_step(rng, 12, chunks=True, more=more), plan_step([long], PAGE_SIZE, "cuda")]
    for step in (*steps, random_step(rng, 12, chunks=True)):
        compare(storage, backend, layer, step)


def test_a_fixed_number_of_rows_agrees_with_the_torch_backend() -> None:
    layer = ObservedLayer(SHAPE, 8, 0.125, None, None, False)
    storage = world(layer)
    fixed = FlashinferAttention([layer, layer], storage).for_batch_size(12, 8)
    rng = random.Random(3)
    for _ in range(3):
        compare(storage, fixed, layer, random_step(rng, 12, chunks=False))


def test_unsupported_layers_are_left_to_torch() -> None:
    storage = PageStorage.allocate(KVGeometry.of_layers((SHAPE,), "bfloat16", PAGE_SIZE), 2, "cuda")
    assert not flashinfer_supports([ObservedLayer(SHAPE, 8, 0.125, None, None, True)], storage)
    assert not flashinfer_supports([ObservedLayer(LayerGeometry(2, 96, 64), 8, 0.1, None, None, False)], storage)
