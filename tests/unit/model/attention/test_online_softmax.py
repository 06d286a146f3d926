"""Native attention where the scores of a query grow from key tile to key tile, slowly and at once, at every level.

The kernels let a query's running maximum lag behind its scores (src/online_softmax.h), which random keys hardly show.
"""

from __future__ import annotations

import math

import pytest
import torch

from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention.base import AttentionCall, Segment, plan_step
from baton.model.attention.native_backend import NativeAttention
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels
from tests.unit.model.attention.test_torch_backend import naive

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

PAGE_SIZE, HEAD_DIM, NUM_HEADS = 16, 32, 8
TILE_KEYS, NUM_TILES = 64, 8
EXPONENTS = {  # of two: the scores of each tile's keys
    "as far as the maximum may lag": [0, 8, 7, 8, 0, 8, 3, 8],
    "a little further each time": [0, 5, 9, 14, 18, 23, 27, 32],
    "past it at once": [0, 60, 60, 68, 69, 200, 0, 300],
    "down, and far up": [0, -200, 90, -200, 98, 99, -90, 100],
    "never seen before": [-300, -300, -300, -290, -292, -300, -280, -280],
}


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 40], ids=["row", "drafts", "chunk"])
@pytest.mark.parametrize("growth", sorted(EXPONENTS))
def test_scores_that_grow(level: IsaLevel, dtype: torch.dtype, num_tokens: int, growth: str):
    num_keys = TILE_KEYS * NUM_TILES
    geometry = KVGeometry.of_layers(
        (LayerGeometry(1, HEAD_DIM, HEAD_DIM),), str(dtype).removeprefix("torch."), PAGE_SIZE
    )
    storage = PageStorage.allocate(geometry, num_keys // PAGE_SIZE)
    generator = torch.Generator().manual_seed(1)
    # Queries are 1 in the first place and 0 elsewhere, so a key's first element is its exponent.
    keys, values = (torch.randn(num_keys, HEAD_DIM, generator=generator) for _ in range(2))
    exponents = torch.tensor(EXPONENTS[growth]).repeat_interleave(TILE_KEYS)
    keys[:, 0] = exponents - torch.rand(num_keys, generator=generator)
    keys, values = keys.to(dtype), values.to(dtype)
    for view, rows in ((storage.keys(0), keys), (storage.values(0), values)):
        view.copy_(rows.view(-1, 1, 1, PAGE_SIZE, HEAD_DIM))
    query = torch.zeros(num_tokens, NUM_HEADS, HEAD_DIM, dtype=dtype)
    query[:, :, 0] = 1.0
    first = num_keys - num_tokens
    call = AttentionCall(0, query, math.log(2))
    backend = NativeAttention(load_kernels(level), storage)
    backend.begin(plan_step([Segment(0, first, num_tokens, range(num_keys // PAGE_SIZE))], PAGE_SIZE))
    out = backend.attend(call).double()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for token in range(num_tokens):
        expected = naive(call, query[token], keys[:, None], values[:, None], first + token)
        torch.testing.assert_close(out[token], expected, atol=tolerance, rtol=tolerance)
