"""Pages of int8: where scales lie, what a token's rounding depends on, and attention over them at every level."""

from __future__ import annotations

import pytest
import torch

from baton.kv.geometry import KVGeometry, LatentGeometry, LayerGeometry
from baton.kv.memory import PageMemory
from baton.model.attention.base import AttentionCall, Segment, plan_step
from baton.model.attention.native_backend import NativeAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.loading.kernel_check import first_wrong_kernel
from baton.model.page_scales import PageScales
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels

LAYERS = (LayerGeometry(2, 32, 32), LayerGeometry(2, 64, 32))
PAGE_SIZE = 4
SEGMENTS = [
    Segment(0, 30, 1, list(range(8, 0, -1))),
    Segment(1, 5, 40, list(range(9, 21))),
    Segment(41, 0, 7, [21, 22]),
]


def geometry(dtype: str = "float32", head_groups: int = 1) -> KVGeometry:
    return KVGeometry.of_layers(LAYERS, dtype, PAGE_SIZE, head_groups).quantized()


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written(dtype: str = "float32", head_groups: int = 1) -> tuple[PageStorage, dict[int, tuple[torch.Tensor, ...]]]:
    """K and V of 24 pages of slots in both layers, and the numbers that were written."""
    storage = PageStorage.allocate(geometry(dtype, head_groups), 24)
    slots, given = torch.arange(24 * PAGE_SIZE), {}
    for layer, shape in enumerate(LAYERS):
        sides = tuple(
            numbers(layer * 2 + side, len(slots), 2, dim, dtype=storage.dtype)
            for side, dim in enumerate((shape.k_head_dim, shape.v_head_dim))
        )
        storage.write(layer, slots // PAGE_SIZE, slots % PAGE_SIZE, *sides)
        given[layer] = sides
    return storage, given


@pytest.mark.parametrize("head_groups", [1, 2])
def test_gathered_numbers_are_within_half_a_step(head_groups: int) -> None:
    storage, given = written(head_groups=head_groups)
    for layer, sides in given.items():
        gathered = storage.select(torch.arange(24)[None]).keys_and_values(layer)
        for side, numbers_read in zip(sides, gathered, strict=True):
            found = numbers_read[0].transpose(0, 1)
            step = side.abs().amax(-1, keepdim=True) / 127
            assert ((found - side).abs() <= 0.5001 * step).all()
            assert not torch.equal(found, side)


def test_parts_cover_heads_and_scales_without_overlap() -> None:
    """Every byte of bytes and scales is written once; the padding stays zero."""
    pages = geometry()
    memory = PageMemory(2, pages.page_bytes)
    storage = PageStorage.on_memory(pages, memory)
    assert storage.scales is not None
    views = [view for layer in range(2) for view in (storage.keys(layer), storage.values(layer))]
    for view in views:
        view.fill_(1)
    for scales in (*storage.scales.keys, *storage.scales.values):
        scales.fill_(1.0)
    num_scales = pages.group.scale_bytes // 4
    assert num_scales == 2 * 2 * 2 * PAGE_SIZE
    used = pages.num_bytes_per_token * PAGE_SIZE
    page = storage.page_bytes()[1]
    assert page[:used].eq(1).all()
    assert page[used : used + 4 * num_scales].contiguous().view(torch.float32).eq(1).all()
    assert not page[used + 4 * num_scales :].any()
    assert pages.part_ends == (used, pages.page_bytes), "scales are in the replicated part"


def test_a_slot_has_the_same_bytes_in_every_chunking() -> None:
    """Rounding looks at one token of one head: chunk cuts, other slots and later writes change nothing."""
    slots = torch.arange(3 * PAGE_SIZE)
    keys, values = numbers(1, len(slots), 2, 32), numbers(2, len(slots), 2, 32)
    whole = PageStorage.allocate(geometry(), 3)
    whole.write(0, slots // PAGE_SIZE, slots % PAGE_SIZE, keys, values)
    for sizes in ((1,) * 12, (5, 7), (4, 4, 4)):
        cut = PageStorage.allocate(geometry(), 3)
        for part in slots.split(list(sizes)):
            cut.write(0, part // PAGE_SIZE, part % PAGE_SIZE, keys[part], values[part])
        assert torch.equal(cut.page_bytes(), whole.page_bytes())


def test_zeros_and_numbers_that_are_not_finite() -> None:
    storage = PageStorage.allocate(geometry(), 1)
    keys = torch.zeros(2, 2, 32)
    keys[1, 1, 3] = torch.inf
    storage.write(0, torch.tensor([0, 0]), torch.tensor([0, 1]), keys, torch.zeros(2, 2, 32))
    found = storage.select(torch.tensor([[0]])).keys(0)[0]
    assert not found[:, 0].any()
    assert not found[0, 1].any()
    assert found[1, 1].isnan().all(), "an infinity is not hidden by a finite number"


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 6])
def test_native_attention_is_that_of_torch(level: IsaLevel, dtype: str, window: int | None) -> None:
    storage, _ = written(dtype, head_groups=2)
    step, kernels = plan_step(SEGMENTS, PAGE_SIZE), load_kernels(level)
    for layer, shape in enumerate(LAYERS):
        query = numbers(9, step.num_tokens, 6, shape.k_head_dim, dtype=storage.dtype)
        call, answers = AttentionCall(layer, query, 0.3, window=window), []
        for backend in (NativeAttention(kernels, storage), TorchAttention(storage)):
            backend.begin(step)
            answers.append(backend.attend(call).float())
        bound = 1e-5 if dtype == "float32" else 4e-2  # torch rounds by the CPU: up to 0.0234 was seen on one
        assert torch.allclose(answers[0], answers[1], rtol=bound, atol=bound)


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_a_kernel_that_takes_wrong_scales_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernels(kernel_levels()[0])
    assert first_wrong_kernel(kernels) is None
    right = PageScales.addresses

    def swapped(scales: PageScales, layer: int) -> tuple[int, int, int]:
        keys, values, stride = right(scales, layer)
        return values, keys, stride

    monkeypatch.setattr(PageScales, "addresses", swapped)
    assert "is off by" in (first_wrong_kernel(kernels) or "")


def test_latents_are_refused() -> None:
    with pytest.raises(ValueError, match="share a scale"):
        KVGeometry.of_layers((LatentGeometry(16, 8),), "float32", PAGE_SIZE).quantized()


def test_the_fingerprint_names_the_kind_of_pages() -> None:
    plain = KVGeometry.of_layers(LAYERS, "float32", PAGE_SIZE)
    assert plain.parts()["dtype"] == "float32"
    assert geometry().parts()["dtype"] == "float32 in pages of int8"
    assert geometry().num_bytes_per_token * 4 == plain.num_bytes_per_token
