"""Latent attention against K and V of every head, expanded in float64, and which modules it serves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import KVGeometry, LatentGeometry, LayerGeometry
from baton.model.attention import latent
from baton.model.attention.base import AttentionBackend, AttentionCall, LatentProjections, Segment, plan_step
from baton.model.attention.hf_hook import LATENT
from baton.model.attention.latent import LatentAttention, keep_latents
from baton.model.attention.layers import ObservedLayer, kv_geometry
from baton.model.attention.native_backend import NativeAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.errors import UnsupportedModel
from baton.model.kernels.library import load_kernels
from baton.model.linears.packed_modules import PackedModule
from baton.model.linears.packing import WeightLayout
from baton.model.loading.loader import load_model
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.kernels import kernel_levels

PAGE_SIZE, NUM_PAGES = 4, 400
NUM_HEADS, NOPE, ROPE, RANK, V_DIM = 5, 24, 16, 48, 20
LAYER = LatentGeometry(RANK, ROPE)
BATCHES = {
    "decode": [(30, 1), (0, 1), (64, 1)],
    "short_chunks": [(0, 4), (5, 9), (17, 1)],
    "long_chunks": [(0, 13), (90, 75)],
    "mixed": [(17, 1), (0, 33), (90, 1), (6, 5), (250, 70), (1, 1)],
}
MAX_ABSORBED = 10


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and tiles of short segments."""
    monkeypatch.setattr(latent, "BLOCK_TOKENS", 32)
    monkeypatch.setattr(latent, "MAX_TILE_ELEMENTS", NUM_HEADS * 32 * 7)


def scattered(lengths: list[tuple[int, int]]) -> list[Segment]:
    pages = random.Random(0).sample(range(NUM_PAGES), NUM_PAGES)
    segments, first = [], 0
    for start, num_tokens in lengths:
        table = [pages.pop() for _ in range(ceil_div(start + num_tokens, PAGE_SIZE) + 1)]
        segments.append(Segment(first, start, num_tokens, table))
        first += num_tokens
    return segments


def expected(call: AttentionCall, weight: torch.Tensor, rows: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[tokens, heads, v_dim] in float64, from K and V of every head at the segment's positions."""
    both = (rows[:, :RANK].double() @ weight.double().T).unflatten(-1, (NUM_HEADS, NOPE + V_DIM))
    rope = rows[:, None, RANK:].double().expand(-1, NUM_HEADS, -1)
    keys, values = torch.cat([both[..., :NOPE], rope], -1), both[..., NOPE:]
    out = []
    for index in range(segment.num_tokens):
        query, seen = call.query[segment.offset + index].double(), segment.start + index + 1
        scores = torch.einsum("hd,thd->ht", query, keys[:seen]) * call.scale
        out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:seen]))
    return torch.stack(out)


def backends(storage: PageStorage) -> list[AttentionBackend]:
    """Over torch, and over the kernels of each level that is built."""
    rows: list[AttentionBackend] = [NativeAttention(load_kernels(level), storage) for level in kernel_levels()]
    return [LatentAttention(storage, backend, MAX_ABSORBED) for backend in (TorchAttention(storage), *rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_latents_give_what_keys_and_values_of_all_heads_give(batch: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    segments = scattered(BATCHES[batch])
    storage = PageStorage.allocate(
        KVGeometry.of_layers((LAYER, LAYER), str(dtype).removeprefix("torch."), PAGE_SIZE), NUM_PAGES
    )
    storage.keys(1).copy_(torch.randn(storage.keys(1).shape, generator=generator))
    linear = torch.nn.Linear(RANK, NUM_HEADS * (NOPE + V_DIM), bias=False, dtype=dtype)
    weight = torch.randn(linear.weight.shape, generator=generator) / RANK**0.5
    linear.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    step = plan_step(segments, PAGE_SIZE)
    query = torch.randn(step.num_tokens, NUM_HEADS, NOPE + ROPE, generator=generator).to(dtype)
    call = AttentionCall(1, query, 0.2, latent=LatentProjections(linear, NUM_HEADS, NOPE))
    for backend in backends(storage):
        backend.begin(step)
        out = backend.attend(call)
        assert out.shape == (step.num_tokens, NUM_HEADS, V_DIM)
        assert out.dtype == dtype
        for segment in segments:
            rows = storage.keys(1)[torch.tensor(segment.pages), 0, 0].flatten(0, 1)[: segment.end]
            wanted = expected(call, linear.weight, rows, segment)
            got = out[segment.offset : segment.offset + segment.num_tokens].double()
            gap = (got - wanted).abs().max() / wanted.abs().max()
            assert gap < (1e-5 if dtype is torch.float32 else 3e-2)


def test_a_row_is_computed_the_same_way_in_every_batch() -> None:
    """Beside a long chunk its bits are those of a step of its own."""
    generator = torch.Generator().manual_seed(2)
    storage = PageStorage.allocate(KVGeometry.of_layers((LAYER,), "float32", PAGE_SIZE), NUM_PAGES)
    storage.keys(0).copy_(torch.randn(storage.keys(0).shape, generator=generator))
    linear = torch.nn.Linear(RANK, NUM_HEADS * (NOPE + V_DIM), bias=False).requires_grad_(False)
    chunk, row = scattered([(0, 30), (41, 1)])
    query = torch.randn(31, NUM_HEADS, NOPE + ROPE, generator=generator)
    call = AttentionCall(0, query, 0.2, latent=LatentProjections(linear, NUM_HEADS, NOPE))
    for backend in backends(storage):
        backend.begin(plan_step([chunk, row], PAGE_SIZE))
        beside = backend.attend(call)[30]
        backend.begin(plan_step([Segment(0, row.start, 1, row.pages)], PAGE_SIZE))
        alone = backend.attend(AttentionCall(0, query[30:], 0.2, latent=call.latent))[0]
        assert torch.equal(beside, alone)


def attention_modules(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


def test_modules_expand_again_when_latents_are_no_longer_kept() -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_models.FAMILIES["deepseek_v3"]())
    assert keep_latents(model, True) == 3
    pair = torch.ones(1, 1, 2, 32), torch.zeros(1, 1, 2, 16)
    for module in attention_modules(model):
        keys, values = module.expand_kv(*pair)
        assert (keys.shape, values.shape) == ((1, 1, 2, 48), (1, 1, 2, 32))
        assert getattr(module, LATENT).v_head_dim == 24
    assert keep_latents(model, False) == 3
    for module in attention_modules(model):
        assert module.expand_kv(*pair)[0].shape == (1, 4, 2, 32)
        assert getattr(module, LATENT, None) is None


def test_a_projection_with_a_bias_or_of_another_class_is_left_alone() -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_models.FAMILIES["deepseek_v3"]())
    first, second, _ = attention_modules(model)
    first.kv_b_proj = torch.nn.Linear(32, 160, bias=True)
    second.kv_b_proj = torch.nn.Identity()
    assert keep_latents(model, True) == 1
    llama = transformers.AutoModelForCausalLM.from_config(tiny_models.FAMILIES["llama"]())
    assert keep_latents(llama, True) == 0


def test_packing_leaves_the_projection_plain(tmp_path: Path) -> None:
    """The absorbed way reads its weight; a packed one would be held twice."""
    directory = tiny_models.save_random_model("deepseek_v3", tmp_path)
    packed = load_model(directory, layout=WeightLayout.ONEDNN).impl
    assert isinstance(packed, torch.nn.Module)
    modules = attention_modules(packed)
    assert len(modules) == 3
    assert all(type(module.kv_b_proj) is torch.nn.Linear for module in modules)
    assert all(isinstance(module.o_proj, PackedModule) for module in modules)


@pytest.mark.parametrize("latent_pages", [True, False])
def test_pages_keep_latents_unless_they_are_switched_off(latent_pages: bool, tmp_path: Path) -> None:
    model = load_model(tiny_models.save_random_model("deepseek_v2", tmp_path), latent_pages=latent_pages)
    layer = LatentGeometry(32, 16) if latent_pages else LayerGeometry(4, 32, 24)
    assert model.geometry.layers == (layer,) * 3
    assert model.geometry.num_bytes_per_token == 3 * 4 * (48 if latent_pages else 4 * (32 + 24))


def observed(geometry: LayerGeometry | LatentGeometry, window: int | None = None) -> ObservedLayer:
    return ObservedLayer(geometry, NUM_HEADS, 0.2, window, None, False)


def test_what_cannot_be_paged_is_refused_in_one_line() -> None:
    with pytest.raises(UnsupportedModel, match="cut into 2 groups, only into 1"):
        kv_geometry((observed(LAYER),), "float32", 16, head_groups=2)
    for layers in ((LAYER, LayerGeometry(1, 16, 16)), (LayerGeometry(1, 16, 16), LAYER)):
        with pytest.raises(UnsupportedModel, match="only some layers keep latents"):
            kv_geometry(tuple(observed(layer) for layer in layers), "float32", 16)
    with pytest.raises(UnsupportedModel, match="with a window"):
        kv_geometry((observed(LAYER, window=8),), "float32", 16)
