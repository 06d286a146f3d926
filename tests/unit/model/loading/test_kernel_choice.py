"""Loading with kernels: correct ones serve; wrong or missing ones leave a working model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.model.attention.backend_choice import choose_backend
from baton.model.attention.native_backend import NativeAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.decoders.lean_weights import LeanModel
from baton.model.decoders.native_ops import NativeOps, choose_ops
from baton.model.decoders.ops import TorchOps
from baton.model.kernels import library
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import Kernels, KernelsUnavailable, load_kernels
from baton.model.linears.packed_modules import PackedModule
from baton.model.linears.packing import WeightLayout
from baton.model.loading import kernel_choice, loader
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_check import first_wrong_kernel
from baton.model.loading.kernel_choice import KernelChoice, KernelUse, choose_kernels
from baton.model.loading.loader import DecoderChoice, load_model
from baton.model.loading.report import WeightReport
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_kernel_choice() -> Iterator[None]:
    kernel_choice.best_kernels.cache_clear()
    yield
    kernel_choice.best_kernels.cache_clear()


def best() -> Kernels:
    return load_kernels(kernel_levels()[-1])


@pytest.mark.parametrize("dtype", [DtypeChoice.FLOAT32, DtypeChoice.BFLOAT16])
def test_a_model_uses_the_kernels(llama: Path, dtype: DtypeChoice):
    loaded = load_model(llama, dtype=dtype)
    assert loaded.kernels is not None
    assert loaded.report.kernel_note == f"{loaded.kernels.level.value} kernels"
    assert loaded.report.check.passed
    storage = PageStorage.allocate(loaded.geometry, 4)
    assert isinstance(choose_backend(loaded.layers, storage, loaded.kernels), NativeAttention)
    assert isinstance(choose_ops(storage, loaded.kernels), NativeOps)
    assert isinstance(loaded.impl, LeanModel)
    assert loaded.report.weights == WeightReport(WeightLayout.PANELS, 3 * 4 + 1, "")


def test_the_stock_decoder_uses_the_kernels(llama: Path):
    loaded = load_model(llama, dtype=DtypeChoice.FLOAT32, decoder=DecoderChoice.STOCK)
    assert isinstance(loaded.impl, torch.nn.Module)
    assert loaded.report.weights == WeightReport(WeightLayout.PANELS, 3 * 7 + 1, "")
    assert sum(isinstance(module, PackedModule) for module in loaded.impl.modules()) == 3 * 7 + 1


def test_kernels_can_be_switched_off(llama: Path):
    loaded = load_model(llama, kernels=KernelUse.NEVER)
    assert loaded.kernels is None
    assert loaded.report.kernel_note == "no native kernels: switched off"
    assert loaded.report.weights.layout is not WeightLayout.PANELS
    storage = PageStorage.allocate(loaded.geometry, 4)
    assert isinstance(choose_backend(loaded.layers, storage, loaded.kernels), TorchAttention)
    assert isinstance(choose_ops(storage, loaded.kernels), TorchOps)


@pytest.mark.usefixtures("fresh_kernel_choice")
def test_torch_serves_without_a_library_and_the_note_names_it(llama: Path, monkeypatch: pytest.MonkeyPatch):
    def missing() -> tuple[IsaLevel, ...]:
        raise KernelsUnavailable("portable kernels are not built (make kernels; it needs a C++ compiler)")

    monkeypatch.setattr(kernel_choice, "available_levels", missing)
    loaded = load_model(llama)
    assert loaded.kernels is None
    assert loaded.report.kernel_note.startswith("no native kernels: portable kernels are not built")
    assert loaded.report.check.passed


def spoiled(kernels: Kernels, name: str) -> Kernels:
    """A kernel that does nothing, so that its output stays uninitialised."""
    functions: dict[str, Any] = {name: lambda *_: None}
    return replace(kernels, **functions)


@pytest.mark.parametrize(
    "name", ["rms_norm", "act_and_mul", "rope_and_write_kv", "linear", "linear_int8", "attend", "argmax", "sample"]
)
def test_the_kernel_check_finds_each_wrong_kernel(name: str):
    assert first_wrong_kernel(best()) is None
    assert first_wrong_kernel(spoiled(best(), name)) is not None


@pytest.mark.usefixtures("fresh_kernel_choice")
def test_a_wrong_level_is_skipped(monkeypatch: pytest.MonkeyPatch):
    levels = kernel_levels()
    wrong = {levels[-1]: spoiled(best(), "attend")}
    monkeypatch.setattr(kernel_choice, "load_kernels", lambda level: wrong.get(level) or load_kernels(level))
    chosen = choose_kernels(KernelUse.AUTO, "cpu")
    if len(levels) == 1:
        assert chosen.kernels is None
    else:
        assert chosen.kernels is not None
        assert chosen.kernels.level is levels[-2]
    assert f"not {levels[-1].value}: attention of" in chosen.note


def late_error(kernels: Kernels, name: str, spoil: Callable[..., None]) -> Kernels:
    """A kernel that is right on the numbers of the check and wrong afterwards."""
    right = getattr(kernels, name)

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        spoil(*arguments)

    functions: dict[str, Any] = {name: wrong}
    return replace(kernels, **functions)


def zero_output(_is_bf16: bool, _x: int, _w: int, _b: int, out: int, rows: int, _in: int, num_out: int) -> None:
    ctypes.memset(out, 0, rows * num_out * 4)


def test_packing_that_fails_the_self_check_is_undone(llama: Path, monkeypatch: pytest.MonkeyPatch):
    bad = KernelChoice(late_error(best(), "linear", zero_output), "bad")
    monkeypatch.setattr(loader, "choose_kernels", lambda *_: bad)
    for decoder in (DecoderChoice.LEAN, DecoderChoice.STOCK):
        loaded = load_model(llama, dtype=DtypeChoice.FLOAT32, decoder=decoder)
        assert (loaded.report.weights.layout, loaded.report.weights.num_matrices) == (WeightLayout.PLAIN, 0)
        assert "not panels: logits differ" in loaded.report.weights.note
        assert loaded.report.check.passed
        assert loaded.kernels is not None


def test_kernels_that_fail_the_self_check_leave_torch(llama: Path, monkeypatch: pytest.MonkeyPatch):
    bad = KernelChoice(spoiled(best(), "attend"), "bad")
    monkeypatch.setattr(loader, "choose_kernels", lambda *_: bad)
    loaded = load_model(llama, dtype=DtypeChoice.FLOAT32)
    assert loaded.kernels is None
    assert "no native kernels: with them" in loaded.report.kernel_note
    assert loaded.report.check.passed


def test_levels_are_those_of_this_cpu():
    """Every level below the highest exists, so that tests can run all of them."""
    levels = library.available_levels()
    assert levels == tuple(IsaLevel)[: len(levels)]
    assert not choose_kernels(KernelUse.AUTO, "cuda").kernels
