"""The decoder of a loaded model, the reason for it, and that a wrong lean decoder never serves."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.model.decoders.lean import LeanDecoder
from baton.model.decoders.lean_weights import LeanModel
from baton.model.decoders.ops import TorchOps
from baton.model.errors import UnsupportedModel
from baton.model.linears import packing
from baton.model.linears.onednn import OneDnnLinear
from baton.model.linears.packing import WeightLayout
from baton.model.loading import loader
from baton.model.loading.config import DtypeChoice
from baton.model.loading.hf_weights import load_weights
from baton.model.loading.loader import DecoderChoice, load_model
from baton.model.storage import PageStorage
from tests import tiny_models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("gpt_oss", tmp_path_factory.mktemp("gpt_oss"))


@pytest.mark.parametrize("choice", [DecoderChoice.AUTO, DecoderChoice.LEAN])
def test_a_served_family_gets_the_lean_decoder(llama: Path, choice: DecoderChoice):
    loaded = load_model(llama, decoder=choice)
    assert isinstance(loaded.impl, LeanModel)
    assert isinstance(loaded.decoder(PageStorage.allocate(loaded.geometry, 4)), LeanDecoder)
    assert loaded.report.stock_note == ""
    assert loaded.report.check.passed


def test_the_stock_decoder_can_be_asked_for(llama: Path):
    loaded = load_model(llama, decoder=DecoderChoice.STOCK)
    assert isinstance(loaded.impl, nn.Module)
    assert loaded.report.stock_note == "asked for"


def test_another_family_gets_the_stock_decoder_and_the_reason(gpt_oss: Path):
    loaded = load_model(gpt_oss)
    assert isinstance(loaded.impl, nn.Module)
    assert loaded.report.stock_note.startswith("gpt_oss is none of")
    with pytest.raises(UnsupportedModel, match=r"no lean decoder: gpt_oss is none of .* Use decoder auto or stock"):
        load_model(gpt_oss, decoder=DecoderChoice.LEAN)


class WrongNorm(TorchOps):
    """Drops the epsilon and adds a hundredth."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().rms_norm(x, weight * 1.01, eps, out)


class SwappedGate(TorchOps):
    def act_and_mul(self, gate_up, activation, out=None):
        return super().act_and_mul(gate_up.roll(gate_up.shape[1] // 2, 1), activation, out)


class ShiftedRope(TorchOps):
    """Shifts positions, which shows in pages and not in logits."""

    def rope_and_write_kv(self, qkv, rope, heads, norms, positions, storage, layer, step, out=None):
        return super().rope_and_write_kv(qkv, rope, heads, norms, positions + 1, storage, layer, step, out)


class FailingKernel(TorchOps):
    def act_and_mul(self, gate_up, activation, out=None):
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("ops", "dtype", "reason"),
    [
        (WrongNorm, DtypeChoice.FLOAT32, "its logits differ"),
        (SwappedGate, DtypeChoice.FLOAT32, "its logits differ"),
        (SwappedGate, DtypeChoice.BFLOAT16, "its logits differ"),
        (FailingKernel, DtypeChoice.FLOAT32, "no such instruction"),
        (ShiftedRope, DtypeChoice.FLOAT32, "its pages differ"),
        (ShiftedRope, DtypeChoice.BFLOAT16, "its pages differ"),
    ],
)
def test_a_decoder_that_fails_the_self_check_is_not_used(
    llama: Path, monkeypatch: pytest.MonkeyPatch, ops: type[TorchOps], dtype: DtypeChoice, reason: str
):
    monkeypatch.setattr(loader, "choose_ops", lambda *_: ops())
    loaded = load_model(llama, dtype=dtype)
    assert isinstance(loaded.impl, nn.Module)
    assert reason in loaded.report.stock_note
    assert loaded.report.check.passed
    with pytest.raises(UnsupportedModel, match="no lean decoder"):
        load_model(llama, dtype=dtype, decoder=DecoderChoice.LEAN)


def test_a_layout_that_fails_leaves_the_lean_decoder_plain(llama: Path, monkeypatch: pytest.MonkeyPatch):
    plain = load_model(llama, layout=WeightLayout.PLAIN)
    right = OneDnnLinear.__call__
    monkeypatch.setattr(packing, "onednn_is_correct", lambda dtype: True)
    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, x: right(self, x) * 1.1)
    loaded = load_model(llama, layout=WeightLayout.ONEDNN)
    assert isinstance(loaded.impl, LeanModel)
    assert loaded.report.weights.num_matrices == 0
    assert "not onednn: logits differ" in loaded.report.weights.note
    assert loaded.report.check == plain.report.check


def test_the_geometry_does_not_depend_on_the_decoder(llama: Path):
    lean, stock = (load_model(llama, decoder=choice) for choice in (DecoderChoice.LEAN, DecoderChoice.STOCK))
    assert lean.geometry == stock.geometry
    assert lean.geometry.parts() == stock.geometry.parts()


def test_a_packed_lean_model_keeps_no_stock_weight(llama: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise every weight would exist twice once it is packed."""
    seen: list[weakref.ref[nn.Module]] = []

    def watched(*arguments: Any) -> tuple[nn.Module, str]:
        module, note = load_weights(*arguments)
        seen.extend(weakref.ref(part) for part in module.modules())
        return module, note

    monkeypatch.setattr(loader, "load_weights", watched)
    loaded = load_model(llama, layout=WeightLayout.ONEDNN)
    gc.collect()
    assert loaded.report.weights.num_matrices == 3 * 4 + 1
    assert len(seen) > 3 * 4
    assert [part for part in seen if part() is not None] == []
