"""Weights are placed on huge pages, and the share is measured from `/proc/self/smaps`."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from baton.kv.memory import HUGE_PAGE_BYTES
from baton.model import huge_pages, smaps
from baton.model.huge_pages import MIN_BYTES, huge_empty, huge_fraction, to_huge_pages
from baton.model.linears.linear import make_linear
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice, load_model
from baton.model.loading.quantization import Quantization
from tests import tiny_models
from tests.kernels import kernel_levels
from tests.tiny_models import small_shape

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not THP.is_file() or "[never]" in THP.read_text() or huge_pages.ADVICE is None, reason="no huge pages here"
)


def numbers(num_bytes: int) -> torch.Tensor:
    return torch.randint(-100, 100, (num_bytes,), dtype=torch.int8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_bytes", [1, MIN_BYTES - 1, MIN_BYTES, 3 * HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 17])
def test_a_copy_equals_its_source(num_bytes: int):
    source = numbers(num_bytes)
    assert torch.equal(to_huge_pages(source), source)


def test_large_tensors_are_aligned_and_keep_their_memory():
    tensor = huge_empty((3, HUGE_PAGE_BYTES), torch.int8)
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    row = tensor[2]
    tensor.fill_(7)
    del tensor
    assert row.eq(7).all()


@needs_huge_pages
def test_advised_memory_is_measured_as_huge():
    assert huge_fraction([huge_empty((4 * HUGE_PAGE_BYTES,), torch.int8).fill_(1)]) == 1.0


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="no huge pages here")
def test_memory_on_small_pages_is_measured_as_such(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huge_pages, "ADVICE", mmap.MADV_NOHUGEPAGE)
    small = huge_empty((4 * HUGE_PAGE_BYTES,), torch.int8).fill_(1)
    assert huge_fraction([small]) == 0.0


@needs_huge_pages
def test_the_fraction_counts_bytes_of_both_kinds(monkeypatch: pytest.MonkeyPatch):
    huge = huge_empty((6 * HUGE_PAGE_BYTES,), torch.int8).fill_(1)
    monkeypatch.setattr(huge_pages, "ADVICE", mmap.MADV_NOHUGEPAGE)
    small = huge_empty((2 * HUGE_PAGE_BYTES,), torch.int8).fill_(1)
    assert huge_fraction([huge, small]) == 0.75


def test_the_fraction_is_unknown_without_smaps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(smaps, "SMAPS", tmp_path / "absent")
    assert huge_fraction([torch.zeros(4)]) is None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model whose matrices are larger than a huge page."""
    import transformers

    config = transformers.Qwen3Config(
        **small_shape(
            hidden_size=1024, intermediate_size=2048, num_hidden_layers=1, head_dim=64, num_attention_heads=16,
            num_key_value_heads=8, tie_word_embeddings=True,
        )
    )  # fmt: skip
    return tiny_models.save_random_config(config, tmp_path_factory.mktemp("wide"), dtype=torch.bfloat16)


@needs_huge_pages
@pytest.mark.parametrize("decoder", [DecoderChoice.LEAN, DecoderChoice.STOCK])
@pytest.mark.parametrize("layout", [WeightLayout.PLAIN, WeightLayout.PANELS])
def test_a_loaded_models_weights_are_on_huge_pages(directory: Path, decoder: DecoderChoice, layout: WeightLayout):
    if layout is WeightLayout.PANELS and not kernel_levels():
        pytest.skip("the kernels are not built")
    use = KernelUse.NEVER if layout is WeightLayout.PLAIN else KernelUse.AUTO
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, decoder=decoder, layout=layout, kernels=use)
    assert model.report.weights.layout is layout
    assert model.report.huge_fraction is not None
    assert model.report.huge_fraction > 0.9


@needs_huge_pages
@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_int8_weights_are_on_huge_pages(directory: Path):
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, quantization=Quantization.INT8)
    assert model.report.huge_fraction is not None
    assert model.report.huge_fraction > 0.9


def test_a_tied_head_stays_tied():
    embedding = torch.randn(1024, 1024)
    head = make_linear(embedding)
    assert head.shares(embedding)
    moved = to_huge_pages(embedding)
    head.tie(moved)
    assert head.tensors()[0].data_ptr() == moved.data_ptr()
