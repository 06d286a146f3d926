"""Kernels with several threads give the bits of one thread, also in concurrent calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention.base import AttentionCall, Segment, plan_step
from baton.model.attention.native_backend import NativeAttention
from baton.model.decoders.native_ops import NativeOps
from baton.model.decoders.ops import Activation
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import Kernels, load_kernels
from baton.model.linears.int8 import Int8Linear
from baton.model.linears.panels import PanelLinear
from baton.model.loading.kernel_check import first_wrong_kernel
from baton.model.loading.kernel_choice import KernelUse, choose_kernels
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

LEVELS = kernel_levels()
NUM_CALLS = 2000
CHUNK, LONG_ROW = list(range(3, 18)), list(range(18, 25))
"""Pages of the test's pool."""


@pytest.fixture(params=LEVELS, ids=lambda level: level.value)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    level: IsaLevel = request.param
    found = load_kernels(level)
    yield found
    found.set_threads(1)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def works(kernels: Kernels) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls that split their work: products of few and of many rows, and operations by tokens."""
    weight, few, many = numbers(210, 64), numbers(3, 64, seed=1), numbers(200, 64, seed=2)
    panels, int8, ops = PanelLinear(kernels, weight, None), Int8Linear(kernels, weight, None), NativeOps(kernels)
    half = PanelLinear(kernels, weight.bfloat16(), None)
    return {
        "panels, few rows": lambda: panels(few),
        "panels, many rows": lambda: panels(many),
        "panels of bfloat16": lambda: half(many.bfloat16()),
        "int8, few rows": lambda: int8(few),
        "int8, many rows": lambda: int8(many),
        "attention": lambda: attention(kernels),
        "attention, one tile": lambda: attention_to_prefix(kernels, 2),
        "attention, one tile of one head": lambda: attention_to_prefix(kernels, 1),
        "norm": lambda: ops.rms_norm(many, torch.ones(64), 1e-6),
        "gate": lambda: ops.act_and_mul(many, Activation.SILU),
    }


def attention(kernels: Kernels) -> torch.Tensor:
    """Attention of rows and of a chunk of several tiles."""
    geometry = KVGeometry.of_layers((LayerGeometry(2, 64, 64),), "float32", 16)
    storage = PageStorage.allocate(geometry, 40)
    for view in (storage.keys(0), storage.values(0)):
        view.copy_(numbers(*view.shape))
    segments = [Segment(0, 40, 1, [0, 1, 2]), Segment(1, 30, 200, CHUNK), Segment(201, 99, 1, LONG_ROW)]
    backend = NativeAttention(kernels, storage)
    backend.begin(plan_step(segments, 16))
    return backend.attend(AttentionCall(0, numbers(202, 6, 64), 0.125))


def attention_to_prefix(kernels: Kernels, num_kv_heads: int) -> torch.Tensor:
    """Attention of a short chunk to a long prefix: one tile a KV head, which several threads cut."""
    geometry = KVGeometry.of_layers((LayerGeometry(num_kv_heads, 64, 64),), "bfloat16", 16)
    storage = PageStorage.allocate(geometry, 40)
    for view in (storage.keys(0), storage.values(0)):
        view.copy_(numbers(*view.shape))
    backend = NativeAttention(kernels, storage)
    backend.begin(plan_step([Segment(0, 500, 61, list(range(36)))], 16))
    return backend.attend(AttentionCall(0, numbers(61, 3 * num_kv_heads, 64).bfloat16(), 0.125, window=300))


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_bits_do_not_depend_on_the_number_of_threads(kernels: Kernels, num_threads: int):
    kernels.set_threads(1)
    wanted = {name: work() for name, work in works(kernels).items()}
    kernels.set_threads(num_threads)
    for name, work in works(kernels).items():
        assert torch.equal(work(), wanted[name]), name
    assert first_wrong_kernel(kernels) is None
    kernels.set_threads(1)
    assert torch.equal(works(kernels)["panels, many rows"](), wanted["panels, many rows"]), "fewer again"


def test_many_short_calls_with_more_threads_than_cores(kernels: Kernels):
    """A worker that is late for a call must neither run its tasks nor run the next call's tasks twice."""
    kernels.set_threads(6)
    product, x = PanelLinear(kernels, numbers(210, 16), None), numbers(2, 16, seed=1)
    wanted = product(x)
    assert all(torch.equal(product(x), wanted) for _ in range(NUM_CALLS))


def test_calls_at_the_same_time_do_not_mix(kernels: Kernels):
    kernels.set_threads(3)
    product = PanelLinear(kernels, numbers(210, 64), None)
    inputs = [numbers(5, 64, seed=seed) for seed in range(4)]
    wanted = [product(x) for x in inputs]
    begin = threading.Barrier(len(inputs))

    def call(i: int) -> bool:
        begin.wait(timeout=30)
        return all(torch.equal(product(inputs[i]), wanted[i]) for _ in range(NUM_CALLS // 4))

    with ThreadPoolExecutor(len(inputs)) as callers:
        assert all(callers.map(call, range(len(inputs))))


def test_kernels_have_as_many_threads_as_torch(monkeypatch: pytest.MonkeyPatch):
    chosen = choose_kernels(KernelUse.AUTO, "cpu").kernels
    assert chosen is not None
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr("baton.model.loading.kernel_choice.best_kernels", lambda: RecordingKernels(asked))
    choose_kernels(KernelUse.AUTO, "cpu")
    assert asked == [3]


class RecordingKernels:
    """A choice whose kernels record the number of threads they are given."""

    def __init__(self, asked: list[int]) -> None:
        self.set_threads = asked.append
        self.kernels = self
