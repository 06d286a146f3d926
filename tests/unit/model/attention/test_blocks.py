"""Blocks, whose tokens see all of their block: every backend against attention written out, and who sees what."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention import dense, flashinfer_backend
from baton.model.attention.base import AttentionBackend, AttentionCall, Segment, plan_step
from baton.model.attention.flashinfer_backend import FlashinferAttention, PageTables, step_mask
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.native_backend import NativeAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels
from tests.unit.model.attention import fake_flashinfer
from tests.unit.model.attention.test_native_backend import filled_storage, history, scattered
from tests.unit.model.attention.test_torch_backend import naive

PAGE_SIZE = 4
NUM_HEADS = 4
LAYER = LayerGeometry(2, 32, 32)
STEP: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [
    (0, 75, ((3, 20), (20, 40), (50, 74))),
    (60, 30, ((40, 70),)),  # begun before: its first pages were cached
    (10, 1, ()),
    (12, 1, ((5, 13),)),
    (0, 9, ((2, 9),)),
    (5, 160, ((50, 110), (120, 165))),
    (3, 12, ()),
]
"""(start, new tokens, blocks): within and across tiles, adjacent, up to the end."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "long_window": {"window": 70},
    "softcap": {"window": 9, "softcap": 1.5},
}


FLASHINFER_RUN, TORCH_ATTEND = FlashinferAttention.run, TorchAttention.attend


def make_segments() -> list[Segment]:
    plain = scattered([(start, num_tokens) for start, num_tokens, _ in STEP], PAGE_SIZE, "blocks")
    return [replace(segment, blocks=blocks) for segment, (_, _, blocks) in zip(plain, STEP, strict=True)]


def check(make: Any, case: str, dtype: torch.dtype = torch.float32) -> None:
    """`make`: a backend over a storage."""
    segments = make_segments()
    storage = filled_storage(LAYER, PAGE_SIZE, segments, dtype)
    for view in (storage.keys(1), storage.values(1)):  # a step clears the pages that it begins
        for segment in segments:
            view[segment.pages[(segment.end - 1) // PAGE_SIZE], :, :, (segment.end - 1) % PAGE_SIZE + 1 :] = 0
    step = plan_step(segments, PAGE_SIZE)
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(step.num_tokens, NUM_HEADS, LAYER.k_head_dim, generator=generator).to(dtype)
    call = AttentionCall(layer=1, query=query, scale=0.3, **CASES[case])
    backend: AttentionBackend = make(storage)
    backend.begin(step)
    out = backend.attend(call)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for segment in segments:
        keys, values = history(storage, segment)
        for place, position in enumerate(range(segment.start, segment.end), segment.offset):
            block = next((end for start, end in segment.blocks if start <= position < end), position + 1)
            wanted = naive(call, query[place], keys, values, position, block)
            torch.testing.assert_close(out[place].double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tile_tokens", [3, 128])
@pytest.mark.parametrize("case", CASES)
def test_torch(case: str, tile_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "TILE_TOKENS", tile_tokens)
    check(TorchAttention, case)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_kernels(case: str, dtype: torch.dtype, level: IsaLevel) -> None:
    check(lambda storage: NativeAttention(load_kernels(level), storage), case, dtype)


@pytest.mark.parametrize("level", kernel_levels()[:1])
def test_the_kernels_beside_torch(level: IsaLevel) -> None:
    """Long segments go to torch, so some tokens of the step are not the kernels'."""
    check(lambda storage: NativeAttention(load_kernels(level), storage, 16), "long_window")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1024)


@pytest.fixture
def flashinfer(double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double computes everything, and torch nothing."""
    monkeypatch.delattr(TorchAttention, "attend")


def observed(case: str) -> ObservedLayer:
    options = CASES[case]
    return ObservedLayer(LAYER, NUM_HEADS, 0.3, options.get("window"), options.get("softcap"), False)


def make_flashinfer(case: str) -> Any:
    """Over a layer without a window, and one of the case; a step without blocks was before."""

    def make(storage: PageStorage) -> FlashinferAttention:
        backend = FlashinferAttention([observed("plain"), observed(case)], storage)
        backend.begin(plan_step([Segment(0, 0, 3, [0])], PAGE_SIZE))
        return backend

    return make


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("case", CASES)
def test_flashinfer_gets_a_mask_of_windows_and_blocks(case: str) -> None:
    check(make_flashinfer(case), case)


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_reads_no_page_before_the_window() -> None:
    """They may be of another request by now: NaN times a weight of 0 is NaN."""
    segments = [Segment(0, 60, 30, list(range(23, 0, -1)), ((70, 86),)), Segment(30, 41, 1, list(range(24, 40)))]
    storage = PageStorage.allocate(KVGeometry.of_layers((LAYER, LAYER), "float32", PAGE_SIZE), 40)
    for view in (storage.keys(1), storage.values(1)):
        view.fill_(1.0)
        for segment in segments:
            view[list(segment.pages[: (segment.start - 6) // PAGE_SIZE])] = torch.nan
    backend = make_flashinfer("window")(storage)
    backend.begin(plan_step(segments, PAGE_SIZE))
    out = backend.attend(AttentionCall(1, torch.ones(31, NUM_HEADS, 32), 0.3, window=7))
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("spare", "user"), [(0, FLASHINFER_RUN), (-1, TORCH_ATTEND)])
def test_a_mask_of_too_many_items_is_left_to_torch(spare: int, user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    num_items = sum(num_tokens * (start + num_tokens) for start, num_tokens, _ in STEP)
    monkeypatch.setattr(flashinfer_backend, "MAX_MASK_ITEMS", num_items + spare)
    spies = {each: Mock(wraps=each) for each in (FLASHINFER_RUN, TORCH_ATTEND)}
    monkeypatch.setattr(FlashinferAttention, "run", lambda *args: spies[FLASHINFER_RUN](*args))
    monkeypatch.setattr(TorchAttention, "attend", lambda *args: spies[TORCH_ATTEND](*args))
    check(make_flashinfer("long_window"), "long_window")
    assert [each for each, spy in spies.items() if spy.called] == [user]


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_gets_no_mask_for_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not behind a step with a block, nor for rows of one token, whose block ends with them."""
    monkeypatch.setattr(flashinfer_backend, "step_mask", None)
    storage = PageStorage.allocate(KVGeometry.of_layers((LAYER, LAYER), "float32", PAGE_SIZE), 4)
    backend = make_flashinfer("window")(storage)
    for segment in (Segment(0, 5, 1, [0, 1], ((2, 6),)), Segment(0, 5, 3, [0, 1])):
        backend.begin(plan_step([segment], PAGE_SIZE))
    with pytest.raises(TypeError):
        backend.begin(plan_step([Segment(0, 0, 6, [0, 1], ((2, 6),))], PAGE_SIZE))


@pytest.mark.parametrize("window", [None, 5, 11, 40])
@pytest.mark.parametrize("chunk", [(0, 60), (0, 8), (8, 41), (41, 60), (17, 25), (33, 42), (40, 41), (24, 60)])
def test_the_mask_is_the_one_of_transformers(window: int | None, chunk: tuple[int, int]) -> None:
    """Of Gemma 3's two kinds of layers. Chunks end inside no image, and may begin there, behind cached rows."""
    blocks, num_tokens, (start, end) = ((9, 25), (26, 41)), 60, chunk
    types = torch.tensor([[int(any(first <= at < end for first, end in blocks)) for at in range(num_tokens)]])
    config = Gemma3TextConfig(sliding_window=window or 1, attn_implementation="eager")
    masks = create_masks_for_vision_model(
        config, torch.zeros(1, num_tokens, 8), None, None, torch.arange(num_tokens)[None],
        get_block_sequence_ids_for_mask(types),
    )  # fmt: skip
    wanted = masks["full_attention" if window is None else "sliding_attention"][0, 0] == 0
    inside = tuple(block for block in blocks if start < block[1] and block[0] < end)
    segment = Segment(0, start, end - start, list(range(ceil_div(num_tokens, PAGE_SIZE))), inside)
    step = plan_step([segment], PAGE_SIZE)
    mask = step_mask(step, torch.device("cpu"), window).view(end - start, -1)
    first = end - mask.shape[1]
    assert first % PAGE_SIZE == 0
    assert torch.equal(mask, wanted[start:end, first:end])
    assert not wanted[start:end, :first].any()
    assert len(PageTables.of(step, window).pages) == ceil_div(end, PAGE_SIZE) - first // PAGE_SIZE


def test_visible_ends() -> None:
    assert Segment(9, 4, 6, [0], ((2, 6), (7, 10))).visible_ends() == [6, 6, 7, 10, 10, 10]
    assert Segment(0, 4, 3, [0]).visible_ends() == [5, 6, 7]
