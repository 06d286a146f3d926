"""Greedy tokens are the same with every level of the native kernels, and with torch alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.domain.request import SamplingParams
from baton.model.attention.base import AttentionCall
from baton.model.attention.native_backend import NativeAttention
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.linears.packing import WeightLayout
from baton.model.loading import loader
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelChoice, KernelUse
from baton.model.loading.loader import DecoderChoice, load_model
from tests import tiny_models
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, PAGE_SIZE, make_prompts, paged_scheduler, stock_tokens
from tests.kernels import kernel_levels

pytestmark = pytest.mark.exactness

GREEDY = SamplingParams(temperature=0.0)
FAMILIES = ["llama", "mistral", "gemma2", "qwen3", "gpt_oss"]
"""Families with plain, windowed and capped attention, normalised heads, and sinks."""


def assert_exact(directory: Path, decoder: DecoderChoice, kernels: KernelUse) -> None:
    model = load_model(
        directory,
        dtype=DtypeChoice.FLOAT32,
        page_size=PAGE_SIZE,
        layout=WeightLayout.PLAIN if kernels is KernelUse.NEVER else WeightLayout.PANELS,
        decoder=decoder,
        kernels=kernels,
    )
    assert (model.kernels is None) == (kernels is KernelUse.NEVER), model.report.kernel_note
    prompts = make_prompts(PAGE_SIZE)
    scheduler = paged_scheduler(model, seed=5)
    assert scheduler.generate(prompts, NUM_NEW_TOKENS, GREEDY) == stock_tokens(directory, prompts)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_equal_at_every_level(level: IsaLevel, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernels = load_kernels(level)
    layers: set[int] = set()
    attend = NativeAttention.attend

    def noted(self: NativeAttention, call: AttentionCall) -> torch.Tensor:
        layers.add(call.layer)
        return attend(self, call)

    monkeypatch.setattr(NativeAttention, "attend", noted)
    monkeypatch.setattr(loader, "choose_kernels", lambda *_: KernelChoice(kernels, level.value))
    assert_exact(tiny_models.save_random_model(family, tmp_path), DecoderChoice.AUTO, KernelUse.AUTO)
    assert len(layers) > 1, "the kernels did not attend"


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_tokens_of_the_stock_decoder_with_kernels(tmp_path: Path):
    assert_exact(tiny_models.save_random_model("qwen2", tmp_path), DecoderChoice.STOCK, KernelUse.AUTO)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_without_kernels(family: str, tmp_path: Path):
    assert_exact(tiny_models.save_random_model(family, tmp_path), DecoderChoice.AUTO, KernelUse.NEVER)
