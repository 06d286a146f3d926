"""Trees of drafts: every backend against attention written out, and a node's bits against those of a plain step."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention import flashinfer_backend
from baton.model.attention.base import AttentionBackend, AttentionCall, Segment, plan_step
from baton.model.attention.flashinfer_backend import FlashinferAttention
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.native_backend import MAX_ROW_TOKENS, NativeAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels
from tests.unit.model.attention import fake_flashinfer
from tests.unit.model.attention.test_row_bits import PAGE_SIZE, SHAPES
from tests.unit.model.attention.test_torch_backend import naive

STARTS = (3, 62, 130)
"""First positions: paths then cross edges of pages and key tiles at different depths."""
CASES: dict[str, dict[str, Any]] = {"plain": {}, "steep": {"scale": 2.0}, "all": {"softcap": 2.0, "sinks": True}}


def trees() -> list[tuple[int, ...]]:
    """A chain, a star, and random trees of up to 16 tokens."""
    rng = random.Random(3)
    drawn = [tuple([-1, *(rng.randrange(node) for node in range(1, size))]) for size in (2, 9, 16)]
    return [tuple(range(-1, 15)), (-1, *[0] * 9), *drawn]


def path(parents: tuple[int, ...], node: int) -> list[int]:
    found = [] if node < 0 else [*path(parents, parents[node]), node]
    return found


def places(start: int, parents: tuple[int, ...], node: int) -> list[int]:
    """The slots that a node attends to, in the order of positions."""
    return [*range(start), *(start + each for each in path(parents, node))]


def filled(layer: LayerGeometry, dtype: torch.dtype) -> tuple[PageStorage, list[int]]:
    """Random pages, and the table of a row over all of them in another order."""
    geometry = KVGeometry.of_layers((layer,), str(dtype).removeprefix("torch."), PAGE_SIZE)
    num_pages = ceil_div(max(STARTS) + MAX_ROW_TOKENS, PAGE_SIZE)
    storage = PageStorage.allocate(geometry, 2 * num_pages)
    generator = torch.Generator().manual_seed(5)
    for view in (storage.keys(0), storage.values(0)):
        view.copy_(torch.randn(view.shape, generator=generator))
    return storage, torch.randperm(2 * num_pages, generator=generator).tolist()


def make_call(case: str, num_tokens: int, num_heads: int, k_dim: int, dtype: torch.dtype) -> AttentionCall:
    more = dict(CASES[case])
    if more.get("sinks"):
        more["sinks"] = torch.linspace(-1, 4, num_heads)
    query = torch.randn(num_tokens, num_heads, k_dim, generator=torch.Generator().manual_seed(7)).to(dtype)
    return AttentionCall(0, query, **{"scale": 0.3, **more})


def check(make: Any, case: str, dtype: torch.dtype = torch.float32) -> None:
    """A step of two chains around each tree, against attention written out."""
    layer, num_heads = LayerGeometry(2, 64, 64), 6
    storage, table = filled(layer, dtype)
    half = len(table) // 2
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for start in STARTS:
        for parents in trees():
            tree = Segment(3, start, len(parents), table[:half], parents=parents)
            after = Segment(3 + len(parents), 20, 1, table[half:])
            segments = [Segment(0, 5, 3, table[half:]), tree, after]
            step = plan_step(segments, PAGE_SIZE)
            call = make_call(case, step.num_tokens, num_heads, layer.k_head_dim, dtype)
            backend: AttentionBackend = make(storage)
            backend.begin(step)
            out = backend.attend(call)
            for segment in segments:
                for node in range(segment.num_tokens):
                    own = segment.parents or tuple(range(-1, segment.num_tokens - 1))
                    seen = places(segment.start, own, node)
                    pages = torch.tensor([segment.pages[place // PAGE_SIZE] for place in seen])
                    slots = torch.tensor([place % PAGE_SIZE for place in seen])
                    keys, values = (
                        view.permute(0, 3, 1, 2, 4)[pages, slots].flatten(1, 2)
                        for view in (storage.keys(0), storage.values(0))
                    )
                    wanted = naive(call, call.query[segment.offset + node], keys, values, len(seen) - 1)
                    got = out[segment.offset + node].double()
                    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_torch(case: str) -> None:
    check(TorchAttention, case)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels(dtype: torch.dtype, level: IsaLevel) -> None:
    check(lambda storage: NativeAttention(load_kernels(level), storage), "all", dtype)


def test_flashinfer_gets_a_mask_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1024)
    layer = ObservedLayer(LayerGeometry(2, 64, 64), 6, 0.3, None, None, False)
    check(lambda storage: FlashinferAttention([layer], storage), "plain")


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "latent"])
def test_a_node_has_the_bits_of_a_plain_step(level: IsaLevel, dtype: torch.dtype, case: str, shape: str) -> None:
    """Each node beside its tree, and alone behind its path in adjacent slots of another table."""
    num_heads, layer = SHAPES[shape]
    assert isinstance(layer, LayerGeometry)
    storage, table = filled(layer, dtype)
    table, other = table[: len(table) // 2], table[len(table) // 2 :]
    backend = NativeAttention(load_kernels(level), storage)
    sides = [view.permute(0, 3, 1, 2, 4) for view in (storage.keys(0), storage.values(0))]
    for start in STARTS:
        for parents in trees():
            call = make_call(case, len(parents), num_heads, layer.k_head_dim, dtype)
            backend.begin(plan_step([Segment(0, start, len(parents), table, parents=parents)], PAGE_SIZE))
            out = backend.attend(call)
            for node in range(len(parents)):
                seen = places(start, parents, node)
                for view in sides:
                    for at, place in enumerate(seen):
                        to, slot = other[at // PAGE_SIZE], at % PAGE_SIZE
                        view[to, slot] = view[table[place // PAGE_SIZE], place % PAGE_SIZE]
                backend.begin(plan_step([Segment(0, len(seen) - 1, 1, other)], PAGE_SIZE))
                alone = backend.attend(make_alone(call, node))
                assert torch.equal(out[node], alone[0]), f"node {node} of {parents} from {start} on"


@pytest.mark.parametrize("level", kernel_levels())
def test_a_node_over_int8_pages_has_the_bits_of_a_plain_step(level: IsaLevel) -> None:
    """Numbers and scales of its path are moved to adjacent slots, as they are when a path is accepted."""
    layer, num_heads, start = LayerGeometry(2, 64, 64), 6, 62
    geometry = KVGeometry.of_layers((layer,), "float32", PAGE_SIZE).quantized()
    num_pages = ceil_div(start + MAX_ROW_TOKENS, PAGE_SIZE)
    storage = PageStorage.allocate(geometry, 2 * num_pages)
    every = torch.arange(2 * num_pages * PAGE_SIZE)
    generator = torch.Generator().manual_seed(5)
    sides = [torch.randn(len(every), 2, 64, generator=generator) for _ in range(2)]
    storage.write(0, every // PAGE_SIZE, every % PAGE_SIZE, *sides)
    table = torch.randperm(2 * num_pages, generator=generator)
    backend = NativeAttention(load_kernels(level), storage)
    for parents in trees():
        call = make_call("plain", len(parents), num_heads, 64, torch.float32)
        backend.begin(plan_step([Segment(0, start, len(parents), table.tolist(), parents=parents)], PAGE_SIZE))
        out = backend.attend(call)
        for node in range(len(parents)):
            seen = torch.tensor(places(start, parents, node))
            at = torch.arange(len(seen))
            other = table[num_pages:]
            sources = table[seen // PAGE_SIZE], seen % PAGE_SIZE
            storage.move_slots(sources, (other[at // PAGE_SIZE], at % PAGE_SIZE))
            backend.begin(plan_step([Segment(0, len(seen) - 1, 1, other.tolist())], PAGE_SIZE))
            assert torch.equal(out[node], backend.attend(make_alone(call, node))[0])


def make_alone(call: AttentionCall, node: int) -> AttentionCall:
    return AttentionCall(call.layer, call.query[node : node + 1], call.scale, None, call.softcap, call.sinks)


@pytest.mark.parametrize("level", [None, *kernel_levels()[:1]])
def test_a_layer_with_a_window_refuses_trees(level: IsaLevel | None) -> None:
    storage, table = filled(LayerGeometry(1, 64, 64), torch.float32)
    torch_backend = TorchAttention(storage)
    backend = torch_backend if level is None else NativeAttention(load_kernels(level), storage)
    backend.begin(plan_step([Segment(0, 3, 3, table, parents=(-1, 0, 0))], PAGE_SIZE))
    with pytest.raises(ValueError, match="window"):
        backend.attend(AttentionCall(0, torch.zeros(3, 1, 64), 0.3, window=2))
