"""Tokens of a row get the same bits in one segment of up to 16 as each gets alone, at every level.

Speculative decoding rests on it: a step then computes several tokens of a sequence where plain decoding computes one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import CacheLayer, KVGeometry, LatentGeometry, LayerGeometry
from baton.model.attention.base import AttentionCall, Segment, plan_step
from baton.model.attention.native_backend import MAX_ROW_TOKENS, NativeAttention
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

PAGE_SIZE = 4
SHAPES: dict[str, tuple[int, CacheLayer]] = {  # query heads, K and V
    "group 1": (2, LayerGeometry(2, 64, 64)),
    "group 2": (4, LayerGeometry(2, 32, 32)),
    "group 3": (6, LayerGeometry(2, 96, 64)),
    "group 4, wide": (4, LayerGeometry(1, 160, 128)),
    "group 7": (14, LayerGeometry(2, 64, 64)),  # alone in registers, with others packed
    "group 20": (20, LayerGeometry(1, 32, 32)),  # a segment of 16 takes two tiles
    "latent": (8, LatentGeometry(64, 32)),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "steep": {"scale": 2.0},  # maxima move often
    "window 1": {"window": 1},
    "window 40": {"window": 40},
    "window 100": {"window": 100},
    "window 1000": {"window": 1000},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 70, "softcap": 1.5, "sinks": True},
}
STARTS = (0, 3, 55, 130)
"""First positions of the row: segments then cross edges of pages, windows and key tiles at different tokens."""


def attended(
    backend: NativeAttention, call: AttentionCall, table: list[int], start: int, sizes: list[int]
) -> torch.Tensor:
    """Output for `call.query` in segments of `sizes` tokens, one call each."""
    parts, done = [], 0
    for size in sizes:
        backend.begin(plan_step([Segment(0, start + done, size, table)], PAGE_SIZE))
        parts.append(backend.attend(replace(call, query=call.query[done : done + size])))
        done += size
    return torch.cat(parts)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_row_of_tokens_has_the_bits_of_single_ones(level: IsaLevel, dtype: torch.dtype, case: str, shape: str):
    num_heads, layer = SHAPES[shape]
    geometry = KVGeometry.of_layers((layer,), str(dtype).removeprefix("torch."), PAGE_SIZE)
    num_pages = ceil_div(max(STARTS) + MAX_ROW_TOKENS, PAGE_SIZE)
    storage = PageStorage.allocate(geometry, num_pages)
    generator = torch.Generator().manual_seed(5)
    for view in (storage.keys(0), storage.values(0)):
        view.copy_(torch.randn(view.shape, generator=generator))
    table = torch.randperm(num_pages, generator=generator).tolist()
    query = torch.randn(MAX_ROW_TOKENS, num_heads, layer.k_head_dim, generator=generator).to(dtype)
    more = dict(CASES[case])
    if more.get("sinks"):
        more["sinks"] = torch.linspace(-1, 4, num_heads)
    backend = NativeAttention(load_kernels(level), storage)
    call = AttentionCall(0, query, **{"scale": 0.3, **more})
    for start in STARTS:
        single = attended(backend, call, table, start, [1] * MAX_ROW_TOKENS)
        for size in range(2, MAX_ROW_TOKENS + 1):
            rest = MAX_ROW_TOKENS % size
            sizes = [size] * (MAX_ROW_TOKENS // size) + [rest] * (rest > 0)
            assert torch.equal(attended(backend, call, table, start, sizes), single), f"{size} from {start} on"
