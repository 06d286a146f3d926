"""Native attention at every level against attention per query: batches, windows, caps, sinks, sizes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import CacheLayer, KVGeometry, LatentGeometry, LayerGeometry
from baton.model.attention import native_backend
from baton.model.attention.base import AttentionCall, Segment, plan_step
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.native_backend import (
    MAX_ROW_TOKENS,
    NativeAttention,
    max_native_segment_tokens,
    native_supports,
)
from baton.model.attention.torch_backend import TorchAttention
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels
from tests.unit.model.attention.test_torch_backend import naive

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

NUM_PAGES = 160
SHAPES: dict[str, tuple[int, CacheLayer]] = {  # heads, K and V
    "grouped": (4, LayerGeometry(2, 32, 32)),
    "alone": (2, LayerGeometry(2, 64, 64)),
    "seven": (7, LayerGeometry(1, 64, 64)),
    "unequal": (6, LayerGeometry(2, 96, 64)),
    "wide": (5, LayerGeometry(1, 128, 160)),
    "latent": (8, LatentGeometry(64, 32)),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "window_of_one": {"window": 1},
    "long_window": {"window": 70},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 9, "softcap": 1.5, "sinks": True},
}
BATCHES = {
    "decode": [(30, 1), (3, 1), (0, 1), (64, 1), (7, 1), (129, 1)],
    "chunks": [(0, 4), (5, 9), (0, 75), (60, 3), (100, 30)],
    "mixed": [(17, 1), (0, 33), (90, 1), (6, 5), (1, 1)],
}


def filled_storage(
    layer: CacheLayer, page_size: int, segments: list[Segment], dtype: torch.dtype, head_groups: int = 1
) -> PageStorage:
    """Layer 1 of 2 holds random K and V at the segments' positions, and NaN elsewhere."""
    generator = torch.Generator().manual_seed(3)
    geometry = KVGeometry.of_layers((layer, layer), str(dtype).removeprefix("torch."), page_size, head_groups)
    storage = PageStorage.allocate(geometry, NUM_PAGES)
    for view in (storage.keys(1), storage.values(1)):
        view.fill_(math.nan)
        for segment in segments:
            for position in range(segment.end):
                heads = torch.randn(layer.num_kv_heads, view.shape[-1], generator=generator).to(dtype)
                view[segment.pages[position // page_size], :, :, position % page_size] = heads.view(
                    *view.shape[1:3], -1
                )
    return storage


def scattered(lengths: list[tuple[int, int]], page_size: int, seed: str) -> list[Segment]:
    """Segments of (start, new tokens), on pages in no order, with one to spare."""
    pages = random.Random(seed).sample(range(NUM_PAGES), NUM_PAGES)
    segments, first = [], 0
    for start, num_tokens in lengths:
        table = [pages.pop() for _ in range(ceil_div(start + num_tokens, page_size) + 1)]
        segments.append(Segment(first, start, num_tokens, table))
        first += num_tokens
    return segments


def history(storage: PageStorage, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the segment's positions, [positions, kv_heads, dim]."""
    table = torch.tensor(segment.pages)
    keys, values = (
        view[table].flatten(1, 2).transpose(1, 2).flatten(0, 1) for view in (storage.keys(1), storage.values(1))
    )
    return keys[: segment.end], values[: segment.end]


def check(
    level: IsaLevel,
    shape: tuple[int, CacheLayer],
    case: str,
    batch: str,
    page_size: int,
    dtype: torch.dtype,
    head_groups: int = 1,
) -> None:
    num_heads, layer = shape
    segments = scattered(BATCHES[batch], page_size, f"{shape}{case}{batch}")
    storage = filled_storage(layer, page_size, segments, dtype, head_groups)
    step = plan_step(segments, page_size)
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(step.num_tokens, num_heads, layer.k_head_dim, generator=generator).to(dtype)
    more = dict(CASES[case])
    if more.get("sinks"):
        more["sinks"] = torch.linspace(-1, 4, num_heads)
    call = AttentionCall(layer=1, query=query, scale=0.3, **more)
    backend = NativeAttention(load_kernels(level), storage)
    backend.begin(step)
    out = backend.attend(call)
    assert out.dtype == dtype
    assert out.shape == (step.num_tokens, num_heads, layer.v_head_dim)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for segment in segments:
        keys, values = history(storage, segment)
        for offset in range(segment.num_tokens):
            place = segment.offset + offset
            wanted = naive(call, query[place], keys, values, segment.start + offset)
            torch.testing.assert_close(out[place].double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", sorted(BATCHES))
@pytest.mark.parametrize("case", sorted(CASES))
def test_equals_attention_written_out(level: IsaLevel, case: str, batch: str, dtype: torch.dtype):
    check(level, SHAPES["grouped"], case, batch, 4, dtype)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", sorted(BATCHES))
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_shape_of_heads(level: IsaLevel, shape: str, batch: str, dtype: torch.dtype):
    check(level, SHAPES[shape], "all", batch, 4, dtype)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", sorted(BATCHES))
@pytest.mark.parametrize("units", [(1, 1), (3, 5)], ids=str)
def test_heads_that_end_in_half_a_span(level: IsaLevel, units: tuple[int, int], batch: str, dtype: torch.dtype):
    """With AVX512: head sizes 16, 48 and 80."""
    unit = load_kernels(level).head_dim_multiple
    check(level, (6, LayerGeometry(2, units[0] * unit, units[1] * unit)), "all", batch, 4, dtype)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [2, 3, 16, 64, 100])
def test_every_size_of_page(level: IsaLevel, page_size: int, dtype: torch.dtype):
    check(level, SHAPES["grouped"], "long_window", "mixed", page_size, dtype)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("slope", [2.0, -2.0, 40.0])
def test_scores_that_grow_or_fall_along_the_keys(level: IsaLevel, slope: float, num_tokens: int, dtype: torch.dtype):
    """Larger scores rescale the sums before them to zero; smaller ones add nothing."""
    segments = [Segment(0, 200, num_tokens, list(range(14)))]
    storage = filled_storage(LayerGeometry(2, 32, 32), 16, segments, dtype)
    for position in range(segments[0].end):
        storage.keys(1)[position // 16, :, :, position % 16] = slope * position / 32
    backend = NativeAttention(load_kernels(level), storage)
    backend.begin(plan_step(segments, 16))
    call = AttentionCall(layer=1, query=torch.ones(num_tokens, 4, 32, dtype=dtype), scale=0.3)
    out = backend.attend(call)
    keys, values = history(storage, segments[0])
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for offset in range(num_tokens):
        wanted = naive(call, call.query[offset], keys, values, 200 + offset)
        torch.testing.assert_close(out[offset].double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", kernel_levels())
def test_a_strided_query_is_read_in_place(level: IsaLevel):
    segments = scattered(BATCHES["mixed"], 4, "transposed")
    storage = filled_storage(LayerGeometry(2, 32, 32), 4, segments, torch.float32)
    step = plan_step(segments, 4)
    heads_first = torch.randn(4, step.num_tokens, 32, generator=torch.Generator().manual_seed(0))
    backend = NativeAttention(load_kernels(level), storage)
    backend.begin(step)
    across = backend.attend(AttentionCall(layer=1, query=heads_first.transpose(0, 1), scale=0.3))
    straight = backend.attend(AttentionCall(layer=1, query=heads_first.transpose(0, 1).contiguous(), scale=0.3))
    assert torch.equal(across, straight)


@pytest.mark.parametrize("level", kernel_levels())
def test_slots_outside_every_window_are_not_read(level: IsaLevel):
    """Slots left of the window, inside the window's first page, and after the last new token."""
    segments = [Segment(0, 30, 1, list(range(8))), Segment(1, 20, 4, list(range(8, 14)))]
    storage = filled_storage(LayerGeometry(2, 32, 32), 4, segments, torch.float32)
    for segment in segments:
        for position in range(segment.start - 5):  # the first query attends to 6 keys, its own included
            page, slot = segment.pages[position // 4], position % 4
            for view in (storage.keys(1), storage.values(1)):
                view[page, :, :, slot] = math.nan
    backend = NativeAttention(load_kernels(level), storage)
    backend.begin(plan_step(segments, 4))
    out = backend.attend(AttentionCall(layer=1, query=torch.ones(5, 4, 32), scale=0.1, window=6))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_visible_nan_reaches_the_output(level: IsaLevel, num_tokens: int, dtype: torch.dtype):
    segments = [Segment(0, 30, num_tokens, list(range(10)))]
    storage = filled_storage(LayerGeometry(2, 32, 32), 4, segments, dtype)
    storage.keys(1)[3, 0, 0, 2] = math.nan
    backend = NativeAttention(load_kernels(level), storage)
    backend.begin(plan_step(segments, 4))
    out = backend.attend(AttentionCall(layer=1, query=torch.ones(num_tokens, 4, 32, dtype=dtype), scale=0.1))
    assert out[:, :2].isnan().all(), "the heads of the first KV head"
    assert torch.isfinite(out[:, 2:]).all()


def observed(layer: LayerGeometry) -> ObservedLayer:
    return ObservedLayer(layer, 4, 0.3, None, None, False)


def test_heads_that_do_not_fit_are_left_to_torch():
    kernels = load_kernels(kernel_levels()[-1])
    for size, fits in ((64, True), (6, False), (68, False)):
        layer = LayerGeometry(2, size, 64)
        storage = PageStorage.allocate(KVGeometry.of_layers((layer,), "float32", 4), 2)
        assert native_supports(kernels, [observed(layer)], storage) is fits
    half = PageStorage.allocate(KVGeometry.of_layers((LayerGeometry(2, 64, 64),), "float16", 4), 2)
    assert not native_supports(kernels, [observed(LayerGeometry(2, 64, 64))], half)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", sorted(BATCHES))
@pytest.mark.parametrize("head_groups", [2, 4])
def test_pages_of_several_head_groups(level: IsaLevel, head_groups: int, batch: str, dtype: torch.dtype):
    check(level, (12, LayerGeometry(4, 64, 32)), "all", batch, 4, dtype, head_groups)


@pytest.mark.parametrize("level", kernel_levels())
def test_one_step_equals_the_torch_backend_in_bfloat16(level: IsaLevel):
    num_heads, layer = SHAPES["seven"]
    segments = scattered(BATCHES["mixed"], 4, "torch")
    storage = filled_storage(layer, 4, segments, torch.bfloat16)
    storage._pool.nan_to_num_()
    step = plan_step(segments, 4)
    query = torch.randn(step.num_tokens, num_heads, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    outputs = []
    for backend in (NativeAttention(load_kernels(level), storage), TorchAttention(storage)):
        backend.begin(step)
        outputs.append(backend.attend(AttentionCall(layer=1, query=query, scale=0.125)).float())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0.05, atol=0.05)


def test_torch_takes_chunks_where_it_is_faster(monkeypatch: pytest.MonkeyPatch):
    """torch computes chunks where it has bfloat16 products that the kernels lack."""
    pairs, none = (
        replace(load_kernels(kernel_levels()[0]), level=level) for level in (IsaLevel.AVX512_BF16, IsaLevel.AVX2)
    )
    has_arithmetic, has_tiles = True, False
    monkeypatch.setattr(native_backend, "has_bfloat16_arithmetic", lambda: has_arithmetic)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    assert max_native_segment_tokens(pairs, torch.bfloat16) is None
    assert max_native_segment_tokens(none, torch.bfloat16) == MAX_ROW_TOKENS
    assert max_native_segment_tokens(none, torch.float32) is None
    has_tiles = True
    assert max_native_segment_tokens(pairs, torch.bfloat16) == MAX_ROW_TOKENS
    assert max_native_segment_tokens(pairs, torch.float32) is None
    has_arithmetic = False
    assert max_native_segment_tokens(none, torch.bfloat16) is None


@pytest.mark.parametrize("limit", [1, 8, 20])
def test_long_segments_can_be_left_to_torch(limit: int):
    """Rows and chunks of one step then come from two backends into one tensor."""
    segments = scattered(BATCHES["mixed"], 4, "shared")
    storage = filled_storage(LayerGeometry(2, 32, 32), 4, segments, torch.float32)
    storage._pool.nan_to_num_()
    step = plan_step(segments, 4)
    query = torch.randn(step.num_tokens, 4, 32, generator=torch.Generator().manual_seed(0))
    call = AttentionCall(layer=1, query=query, scale=0.3, window=20)
    kernels = load_kernels(kernel_levels()[-1])
    answers = []
    for backend in (NativeAttention(kernels, storage), NativeAttention(kernels, storage, limit)):
        backend.begin(step)
        answers.append(backend.attend(call))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-5)
    backend.begin(plan_step(scattered([(5, 1)], 4, "row"), 4))
    assert backend.attend(AttentionCall(layer=1, query=query[:1], scale=0.3)).shape == (1, 4, 32)
