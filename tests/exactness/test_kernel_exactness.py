"""Greedy tokens are the same with every level of the native kernels, and with torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.domain.request import SamplingParams
from baton.model.attention.base import AttentionCall
from baton.model.attention.native_backend import NativeAttention
from baton.model.decoders.native_layers import NativeLayers
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.linears.packing import WeightLayout
from baton.model.loading import loader
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelChoice, KernelUse
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from tests import tiny_models
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, PAGE_SIZE, make_prompts, paged_scheduler, stock_tokens
from tests.kernels import kernel_levels

pytestmark = pytest.mark.exactness

GREEDY = SamplingParams(temperature=0.0)
FAMILIES = ["llama", "mistral", "gemma2", "qwen3", "gpt_oss"]
"""Families with plain, windowed and capped attention, normalised heads, and sinks."""
IN_ONE_CALL = {"llama", "mistral", "qwen3"}
"""Those of which all layers but the last are one native call."""


def load(directory: Path, decoder: DecoderChoice, kernels: KernelUse) -> LoadedModel:
    model = load_model(
        directory,
        dtype=DtypeChoice.FLOAT32,
        page_size=PAGE_SIZE,
        layout=WeightLayout.PLAIN if kernels is KernelUse.NEVER else WeightLayout.PANELS,
        decoder=decoder,
        kernels=kernels,
    )
    assert (model.kernels is None) == (kernels is KernelUse.NEVER), model.report.kernel_note
    return model


def assert_exact(model: LoadedModel, directory: Path) -> None:
    prompts = make_prompts(PAGE_SIZE)
    scheduler = paged_scheduler(model, seed=5)
    assert scheduler.generate(prompts, NUM_NEW_TOKENS, GREEDY) == stock_tokens(directory, prompts)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_equal_at_every_level(level: IsaLevel, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernels = load_kernels(level)
    layers: set[int] = set()
    in_one_call: set[int] = set()
    attend, run = NativeAttention.attend, NativeLayers.run

    def noted(self: NativeAttention, call: AttentionCall) -> torch.Tensor:
        layers.add(call.layer)
        return attend(self, call)

    def run_noted(self: NativeLayers, *step: Any) -> None:
        in_one_call.add(self.num_layers)
        run(self, *step)

    monkeypatch.setattr(loader, "choose_kernels", lambda *_: KernelChoice(kernels, level.value))
    model = load(tiny_models.save_random_model(family, tmp_path), DecoderChoice.AUTO, KernelUse.AUTO)
    monkeypatch.setattr(NativeAttention, "attend", noted)
    monkeypatch.setattr(NativeLayers, "run", run_noted)
    assert_exact(model, tmp_path)
    last = len(model.layers) - 1
    assert in_one_call == ({last} if family in IN_ONE_CALL else set()), "layers in one call"
    assert layers == ({last} if family in IN_ONE_CALL else {*range(last + 1)}), "layers of which the kernels attended"


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_tokens_of_the_stock_decoder_with_kernels(tmp_path: Path):
    tiny_models.save_random_model("qwen2", tmp_path)
    assert_exact(load(tmp_path, DecoderChoice.STOCK, KernelUse.AUTO), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_without_kernels(family: str, tmp_path: Path):
    tiny_models.save_random_model(family, tmp_path)
    assert_exact(load(tmp_path, DecoderChoice.AUTO, KernelUse.NEVER), tmp_path)
