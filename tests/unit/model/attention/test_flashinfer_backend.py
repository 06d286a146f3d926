"""Plans for flashinfer against a fake of it in plain torch: tables, windows, caps, and fixed buffers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from baton.domain.request import SamplingParams
from baton.engine.runner import ModelRunner
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.kv.memory import PageMemory
from baton.model.attention import backend_choice, flashinfer_backend
from baton.model.attention.base import AttentionCall, Segment, StepMetadata, plan_step
from baton.model.attention.flashinfer_backend import FlashinferAttention, flashinfer_supports
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.torch_backend import TorchAttention
from baton.model.decoders import cuda_graphs
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import load_model
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.exactness.random_scheduler import RandomScheduler
from tests.exactness.test_runner_exactness import make_prompts
from tests.unit.model.attention import fake_flashinfer
from tests.unit.model.decoders.test_cuda_graphs import RecomputingCapturer

PAGE_SIZE = 4
NUM_PAGES = 40
SHAPE = LayerGeometry(2, 16, 16)
ROWS = [Segment(0, 30, 1, [*range(8)]), Segment(1, 0, 1, [9]), Segment(2, 7, 1, [11, 10])]
CHUNKS = [Segment(0, 9, 1, [7, 3, 9]), Segment(1, 5, 13, [1, 30, 12, 2, 4]), Segment(14, 0, 3, [20])]


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1024)


def world(*layers: ObservedLayer, head_groups: int = 1) -> tuple[PageStorage, FlashinferAttention]:
    geometry = KVGeometry.of_layers(tuple(layer.geometry for layer in layers), "float32", PAGE_SIZE, head_groups)
    storage = PageStorage.allocate(geometry, NUM_PAGES, has_scratch=True)
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(layers)):
        for view in (storage.keys(layer), storage.values(layer)):
            view.copy_(torch.randn(view.shape, generator=generator))
    return storage, FlashinferAttention(layers, storage)


def layer(window: int | None = None, softcap: float | None = None, num_heads: int = 4) -> ObservedLayer:
    return ObservedLayer(SHAPE, num_heads, 0.25, window, softcap, False)


def compare(storage: PageStorage, backend, layers: list[ObservedLayer], step: StepMetadata) -> None:
    reference = TorchAttention(storage)
    backend.begin(step)
    reference.begin(step)
    for index, seen in enumerate(layers):
        query = torch.randn(step.num_tokens, seen.num_heads, 16, generator=torch.Generator().manual_seed(index))
        call = AttentionCall(index, query, seen.scale, seen.window, seen.softcap)
        torch.testing.assert_close(backend.attend(call), reference.attend(call), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("segments", [ROWS, CHUNKS], ids=["rows", "chunks"])
@pytest.mark.parametrize("num_heads", [2, 6, 14])  # groups of 1, 3 and 7
def test_every_kind_of_layer_and_step_agrees_with_torch(segments, num_heads):
    layers = [layer(None, None, num_heads), layer(6, None, num_heads), layer(None, 9.0, num_heads)]
    layers += [layer(6, 9.0, num_heads)]
    storage, attention = world(*layers)
    for _ in range(2):
        compare(storage, attention, layers, plan_step(segments, PAGE_SIZE))
    compare(storage, attention, layers, plan_step(ROWS if segments is CHUNKS else CHUNKS, PAGE_SIZE))


def test_a_fixed_batch_computes_from_its_buffers():
    layers = [layer(), layer(6), layer()]
    storage, attention = world(*layers)
    fixed = attention.for_batch_size(3, 8)
    compare(storage, fixed, layers, plan_step(ROWS, PAGE_SIZE))
    whole = [Segment(row, 31, 1, [*range(row, row + 8)]) for row in range(3)]  # every table at its largest
    compare(storage, fixed, layers, plan_step(whole, PAGE_SIZE))
    compare(storage, attention, layers, plan_step(CHUNKS, PAGE_SIZE))
    with pytest.raises(AssertionError, match="batch size"):
        fixed.begin(plan_step(ROWS[:2], PAGE_SIZE))


def test_layers_of_one_window_share_a_plan():
    layers = [layer(), layer(6), layer(), layer(6)]
    _, attention = world(*layers)
    attention.begin(plan_step(ROWS, PAGE_SIZE))
    attention.begin(plan_step(CHUNKS, PAGE_SIZE))
    assert [wrapper.num_plans for wrapper in (*attention._rows.values(), *attention._chunks.values())] == [1] * 4


def test_flashinfer_is_unsupported_without_a_gpu():
    storage, _ = world(layer())
    assert not flashinfer_supports([layer()], storage)


@pytest.mark.parametrize("segments", [ROWS, CHUNKS], ids=["rows", "chunks"])
def test_head_major_pages_are_read_in_place(segments):
    layers = [layer(), layer(6)]
    storage, attention = world(*layers, head_groups=SHAPE.num_kv_heads)
    compare(storage, attention, layers, plan_step(segments, PAGE_SIZE))
    assert storage.keys(1).flatten(1, 2).data_ptr() == storage.keys(1).data_ptr(), "a view, no copy of the pool"


@pytest.mark.parametrize(("head_groups", "supported"), [(1, True), (2, False), (4, True)])
def test_heads_at_two_distances_are_left_to_torch(head_groups: int, supported: bool):
    shape = LayerGeometry(4, 64, 64)
    geometry = KVGeometry.of_layers((shape,), "bfloat16", 16, head_groups)
    on_gpu = cast(PageStorage, SimpleNamespace(device=torch.device("cuda"), geometry=geometry))
    assert flashinfer_supports([ObservedLayer(shape, 8, 0.25, None, None, False)], on_gpu) is supported


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_runner_with_graphs_gives_the_eager_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = load_model(
        tiny_models.save_random_model(family, tmp_path), dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE,
        layout=WeightLayout.PLAIN, kernels=KernelUse.NEVER,
    )  # fmt: skip
    prompts = make_prompts(PAGE_SIZE)
    host = PageMemory(16, model.geometry.page_bytes)

    def tokens(max_graph_rows: int) -> list[list[int]]:
        storage = PageStorage.allocate(model.geometry, 600, host=host, has_scratch=True)
        runner = ModelRunner(model, storage, max_graph_rows)
        assert bool(runner.graph_sizes) == bool(max_graph_rows)
        scheduler = RandomScheduler(runner, 600, PAGE_SIZE, 16, seed=5)
        return scheduler.generate(prompts, 10, SamplingParams(temperature=0.0))

    wanted = tokens(0)
    monkeypatch.setattr(backend_choice, "flashinfer_supports", lambda layers, storage: True)
    capturer = RecomputingCapturer()
    monkeypatch.setattr(cuda_graphs, "CudaGraphCapturer", lambda device: capturer)
    assert tokens(8) == wanted
    assert capturer.num_replays > 5
