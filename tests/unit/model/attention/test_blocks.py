"""Blocks, whose tokens see all of their block: every backend against attention written out, and who sees what."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.kv.geometry import LayerGeometry
from baton.model.attention import dense, flashinfer_backend
from baton.model.attention.base import AttentionBackend, AttentionCall, Segment, plan_step
from baton.model.attention.flashinfer_backend import FlashinferAttention
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


@pytest.mark.parametrize("case", CASES)
def test_flashinfer_leaves_them_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1024)
    options = CASES[case]
    layer = ObservedLayer(LAYER, NUM_HEADS, 0.3, options.get("window"), options.get("softcap"), False)

    def make(storage: PageStorage) -> AttentionBackend:
        backend = FlashinferAttention([layer, layer], storage)
        backend.begin(plan_step([Segment(0, 0, 3, [0])], PAGE_SIZE))  # a step without blocks before
        return backend

    check(make, case)


def test_visible_ends() -> None:
    assert Segment(9, 4, 6, [0], ((2, 6), (7, 10))).visible_ends() == [6, 6, 7, 10, 10, 10]
    assert Segment(0, 4, 3, [0]).visible_ends() == [5, 6, 7]
