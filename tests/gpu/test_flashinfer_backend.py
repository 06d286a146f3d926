"""The CUDA backend against the torch backend on the same pages. Needs a GPU and flashinfer."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention.base import AttentionCall, Segment, plan_step
from baton.model.attention.flashinfer_backend import FlashinferAttention, flashinfer_serves
from baton.model.attention.torch_backend import TorchAttention
from baton.model.geometry import ObservedLayer
from baton.model.storage import PageStorage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"),
]

PAGE_SIZE = 16
SHAPE = LayerGeometry(2, 64, 64)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_agrees_with_the_torch_backend(window: int | None, softcap: float | None) -> None:
    storage = PageStorage.allocate(KVGeometry((SHAPE, SHAPE), "bfloat16", PAGE_SIZE), 32, "cuda")
    generator = torch.Generator().manual_seed(0)
    for view in (storage.keys(1), storage.values(1)):
        view.copy_(torch.randn(view.shape, generator=generator))
    layers = [ObservedLayer(SHAPE, 8, 0.125, window, softcap, False)] * 2
    assert flashinfer_serves(layers, storage)
    segments = [Segment(0, 33, 1, [7, 3, 9]), Segment(1, 5, 40, [1, 30, 12]), Segment(41, 0, 3, [20])]
    step = plan_step(segments, PAGE_SIZE, "cuda")
    query = torch.randn(44, 8, 64, generator=generator).to("cuda", torch.bfloat16)
    call = AttentionCall(layer=1, query=query, scale=0.125, window=window, softcap=softcap)
    outputs = []
    for backend in (FlashinferAttention(layers, storage), TorchAttention(storage)):
        backend.begin(step)
        outputs.append(backend.attend(call).float())
    torch.testing.assert_close(*outputs, rtol=0.03, atol=0.03)


def test_what_it_cannot_serve_is_left_to_torch() -> None:
    storage = PageStorage.allocate(KVGeometry((SHAPE,), "bfloat16", PAGE_SIZE), 2, "cuda")
    assert not flashinfer_serves([ObservedLayer(SHAPE, 8, 0.125, None, None, True)], storage)
    assert not flashinfer_serves([ObservedLayer(LayerGeometry(2, 96, 64), 8, 0.1, None, None, False)], storage)
