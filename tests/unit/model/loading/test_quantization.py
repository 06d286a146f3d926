"""Loading with int8 weights: requirements, report, kept tensors, and links between workers."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.bundled import MODEL_DIR
from baton.model.decoders.lean_weights import LeanModel
from baton.model.errors import UnsupportedModel
from baton.model.linears.int8 import Int8Linear
from baton.model.linears.linear import make_linear
from baton.model.linears.packing import WeightLayout
from baton.model.loading import loader
from baton.model.loading.config import DtypeChoice
from baton.model.loading.hf_weights import load_weights
from baton.model.loading.identity import model_fingerprint
from baton.model.loading.kernel_choice import KernelChoice, KernelUse, choose_kernels
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.loading.quantization import MAX_ERROR, Quantization, compare, divergences
from baton.model.loading.report import WeightReport
from tests import tiny_models
from tests.kernels import kernel_levels
from tests.unit.model.dequantize.checkpoints import packed_copy
from tests.unit.model.dequantize.test_fp8 import BLOCKS, in_blocks

with_kernels = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("qwen3", tmp_path_factory.mktemp("qwen3"))


def load_int8(directory: Path, **more: Any) -> LoadedModel:
    return load_model(directory, quantization=Quantization.INT8, **more)


@with_kernels
@pytest.mark.parametrize("dtype", [DtypeChoice.FLOAT32, DtypeChoice.BFLOAT16])
def test_the_report_has_the_count_and_error_of_quantised_matrices(qwen3: Path, dtype: DtypeChoice):
    report = load_int8(qwen3, dtype=dtype).report
    assert report.check.passed, "the float model's"
    assert report.quantization is not None
    assert report.quantization.num_linears == 3 * 4 + 1
    assert 0.001 < report.quantization.error < 0.1
    assert 0.0 < report.quantization.divergence < 0.01
    assert report.weights == WeightReport(WeightLayout.PLAIN, 0, "int8")
    assert load_model(qwen3, dtype=dtype).report.quantization is None


@with_kernels
def test_a_dequantised_checkpoint_may_be_quantised_again(qwen3: Path, tmp_path: Path):
    """The report compares with the dequantised model, so it is that of the plain one with the same weights."""
    packed, plain = packed_copy(qwen3, tmp_path, in_blocks, BLOCKS)
    ours, wanted = (load_int8(directory, dtype=DtypeChoice.FLOAT32).report for directory in (packed, plain))
    assert ours.checkpoint_note.startswith("fp8: ")
    assert ours.quantization is not None
    assert wanted.quantization is not None
    divergence = wanted.quantization.divergence
    assert ours.quantization.divergence == pytest.approx(divergence, rel=1e-3), "sums of stock forwards differ in bits"
    assert replace(ours.quantization, divergence=divergence) == wanted.quantization


@with_kernels
def test_float_weights_are_dropped_except_the_embedding(qwen3: Path, monkeypatch: pytest.MonkeyPatch):
    """A tied head becomes int8; the embedding stays float."""
    seen: dict[str, weakref.ref[torch.Tensor]] = {}

    def watched(*arguments: Any) -> tuple[torch.nn.Module, str]:
        module, note = load_weights(*arguments)
        seen.update({name: weakref.ref(parameter) for name, parameter in module.named_parameters()})
        return module, note

    plain = load_model(qwen3).impl
    monkeypatch.setattr(loader, "load_weights", watched)
    body = load_int8(qwen3).impl
    assert isinstance(plain, LeanModel)
    assert isinstance(body, LeanModel)
    gc.collect()
    assert len(seen) > 3 * 4
    assert [name for name, parameter in seen.items() if parameter() is not None] == []
    assert torch.equal(body.embedding, plain.embedding)
    tensors = [thing for thing in gc.get_referents(*body._linears()) if isinstance(thing, torch.Tensor)]
    assert len(tensors) == len(body._linears())
    assert sum(tensor.numel() for tensor in tensors) == 0


@with_kernels
def test_a_quantised_matrix_drops_its_float_one():
    kernels = choose_kernels(KernelUse.AUTO, "cpu").kernels
    assert kernels is not None
    weight, bias = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), torch.ones(16)
    x, watched = torch.ones(2, 64), weakref.ref(weight)
    linear = make_linear(weight, bias)
    before = linear(x)
    del weight
    linear.quantize(kernels)
    assert watched() is None
    torch.testing.assert_close(linear(x), before, rtol=0.05, atol=0.5)


def test_int8_without_kernels_is_refused_before_weights_are_read(qwen3: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "load_weights", lambda *_: pytest.fail("too late"))
    with pytest.raises(UnsupportedModel, match=r"only native kernels multiply .*switched off\. Use quantization none"):
        load_int8(qwen3, kernels=KernelUse.NEVER)
    monkeypatch.setattr(loader, "choose_kernels", lambda *_: KernelChoice(None, "not avx2: linear_int8 is off by 1"))
    with pytest.raises(UnsupportedModel, match="linear_int8 is off by 1"):
        load_int8(qwen3)


def test_int8_on_a_gpu_is_refused(qwen3: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "load_weights", lambda *_: pytest.fail("too late"))
    with pytest.raises(UnsupportedModel, match="no int8 weights on cuda"):
        load_int8(qwen3, device="cuda", dtype=DtypeChoice.FLOAT32)


@with_kernels
def test_int8_with_the_stock_decoder_is_refused(qwen3: Path, tmp_path: Path):
    with pytest.raises(UnsupportedModel, match="only the lean decoder has them, and gpt_oss is none of"):
        load_int8(tiny_models.save_random_model("gpt_oss", tmp_path))
    with pytest.raises(UnsupportedModel, match="only the lean decoder has them, and asked for"):
        load_int8(qwen3, decoder=DecoderChoice.STOCK)


@with_kernels
@pytest.mark.parametrize("factor", [-1.0, 2.0, math.nan])
def test_a_wrong_product_is_refused(qwen3: Path, monkeypatch: pytest.MonkeyPatch, factor: float):
    right = Int8Linear.__call__
    monkeypatch.setattr(Int8Linear, "__call__", lambda self, x: right(self, x) * factor)
    with pytest.raises(UnsupportedModel, match="with int8 weights logits differ"):
        load_int8(qwen3)


@with_kernels
def test_weights_that_are_not_finite_are_refused(qwen3: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object) -> None:
        raise ValueError("the weight has numbers that are not finite")

    monkeypatch.setattr(Int8Linear, "__init__", refused)
    with pytest.raises(UnsupportedModel, match="no int8 weights: the weight has numbers"):
        load_int8(qwen3)


def test_error_and_divergence_of_known_logits():
    before = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    same = compare(before, before + 3.0, 1)
    assert same.divergence == pytest.approx(0.0, abs=1e-9), "a constant changes no distribution"
    assert same.error == pytest.approx(3.0, rel=0.1)
    assert compare(before, before.flip(1), 1).error == pytest.approx(2**0.5, rel=0.1), "as unrelated ones"
    assert compare(before, before.flip(1), 1).error > 2 * MAX_ERROR
    half, most = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    wanted = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergences(half, most).tolist() == pytest.approx([wanted])


@with_kernels
def test_fingerprints_of_int8_and_float_weights_differ():
    plain, int8 = load_model(MODEL_DIR), load_int8(MODEL_DIR)
    assert plain.geometry == int8.geometry, "so nothing else would keep them apart"
    ours, theirs = (
        model_fingerprint(MODEL_DIR, "root", "text", model.geometry, kind)
        for model, kind in ((plain, Quantization.NONE), (int8, Quantization.INT8))
    )
    assert ours.difference(theirs.digest, theirs.parts) == "quantization: none here, int8 there"
