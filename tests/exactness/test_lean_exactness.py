"""The lean decoder's greedy tokens equal those of the stock model's `generate()`, for every family and variant."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.bundled import MODEL_DIR
from baton.domain.request import SamplingParams
from baton.engine.batch import Batch, StepOutput
from baton.engine.runner import ModelRunner
from baton.model.decoders.lean_spec import FAMILIES, SUPPORTED_ROPES
from baton.model.decoders.lean_weights import LeanModel
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.storage import PageStorage
from baton.model.vision.spec import VISION
from tests import tiny_models
from tests.exactness.random_scheduler import RandomScheduler
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, NUM_PAGES, make_prompts, paged_scheduler, stock_tokens
from tests.kernels import kernel_levels
from tests.tiny_models import WINDOW, small_shape

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8
GREEDY = SamplingParams(temperature=0.0)
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **more}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=256)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)


def llama(**more: Any) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**small_shape(**more))


VARIANTS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    **{family: tiny_models.FAMILIES[family] for family in tiny_models.FAMILIES if family in FAMILIES},
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-one-kv-head": lambda: llama(num_key_value_heads=1),
    "llama-no-groups": lambda: llama(num_key_value_heads=4),
    "llama-one-layer": lambda: llama(num_hidden_layers=1),
    "llama-odd-sizes": lambda: llama(hidden_size=60, intermediate_size=71, head_dim=10),
    "llama-gelu": lambda: llama(hidden_act="gelu_pytorch_tanh"),
    "llama-default-rope": lambda: llama(rope_parameters=rope("default", rope_theta=500.0)),
    "llama-linear": lambda: llama(rope_parameters=rope("linear", factor=3.0)),
    "llama-llama3": lambda: llama(rope_parameters=LLAMA3),
    "llama-yarn": lambda: llama(rope_parameters=YARN),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **small_shape(use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED_LAYERS)
    ),
    "qwen3-bias": lambda: transformers.Qwen3Config(**small_shape(attention_bias=True)),
    "phi3": lambda: transformers.Phi3Config(**small_shape(sliding_window=WINDOW)),
    "phi3-partial-rotary": lambda: transformers.Phi3Config(
        **small_shape(rope_parameters=rope("default", partial_rotary_factor=0.5))
    ),
    "gemma2-softcaps": lambda: transformers.Gemma2Config(
        **small_shape(
            sliding_window=WINDOW,
            layer_types=MIXED_LAYERS,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        )
    ),
    "gemma3_text-two-ropes": lambda: transformers.Gemma3TextConfig(
        **small_shape(
            sliding_window=WINDOW,
            layer_types=MIXED_LAYERS,
            rope_parameters={
                "full_attention": rope("linear", factor=8.0, rope_theta=1000000.0),
                "sliding_attention": rope("default"),
            },
        )
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **small_shape(num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)
    ),
    "qwen3_moe-some-plain-layers": lambda: transformers.Qwen3MoeConfig(
        **small_shape(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1])
    ),
}


@pytest.fixture(params=KernelUse)
def kernels(request: pytest.FixtureRequest) -> KernelUse:
    """Plain torch, and the native kernels."""
    use: KernelUse = request.param
    if use is KernelUse.AUTO and not kernel_levels():
        pytest.skip("the kernels are not built")
    return use


def lean_model(
    directory: Path,
    kernels: KernelUse = KernelUse.NEVER,
    layout: WeightLayout | None = None,
    page_size: int = PAGE_SIZE,
) -> LoadedModel:
    model = load_model(
        directory,
        dtype=DtypeChoice.FLOAT32,
        page_size=page_size,
        layout=layout or (WeightLayout.PLAIN if kernels is KernelUse.NEVER else WeightLayout.PANELS),
        decoder=DecoderChoice.LEAN,
        kernels=kernels,
    )
    assert isinstance(model.impl, LeanModel)
    assert (model.kernels is None) == (kernels is KernelUse.NEVER), model.report.kernel_note
    return model


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, and the stock model's tokens after the prompts for a page size."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    @classmethod
    def of(cls, directory: Path, page_size: int = PAGE_SIZE) -> Checkpoint:
        prompts = make_prompts(page_size)
        return cls(directory, prompts, stock_tokens(directory, prompts))


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("variant")
    return Checkpoint.of(tiny_models.save_random_config(VARIANTS[request.param](), directory))


def assert_exact(checkpoint: Checkpoint, model: LoadedModel) -> None:
    prompts, expected = checkpoint.prompts, checkpoint.expected
    scheduler = paged_scheduler(model, seed=11)
    assert scheduler.generate(prompts, NUM_NEW_TOKENS, GREEDY) == expected
    assert len({token for output in expected for token in output}) > NUM_NEW_TOKENS, "greedy output is degenerate"
    coverage = scheduler.coverage
    assert min(coverage.mixed_steps, coverage.chunked_prompts, coverage.shared_pages, coverage.swapped_rows) > 2, (
        coverage
    )


@dataclass(slots=True)
class RoundRobinRunner:
    """A `Runner` that runs each step on the next of several runners."""

    runners: list[ModelRunner]
    num_steps: int = 0

    def run(self, batch: Batch) -> StepOutput:
        self.num_steps += 1
        return self.runners[self.num_steps % len(self.runners)].run(batch)


def test_every_family_and_rotary_scaling_has_its_variant():
    configs = [make() for make in VARIANTS.values()]
    # Text models that only vision-language models have: tests/exactness/vision.
    of_images = {kind for spec in VISION.values() if spec.has_grid for kind in spec.text_types}
    assert {config.model_type for config in configs} == set(FAMILIES) - of_images
    assert {(config.rope_parameters or {}).get("rope_type") for config in configs} >= SUPPORTED_ROPES


def test_tokens_are_the_stock_models(checkpoint: Checkpoint, kernels: KernelUse):
    assert_exact(checkpoint, lean_model(checkpoint.directory, kernels))


@pytest.mark.parametrize("variant", ["qwen2", "gemma3_text", "phi3"])
def test_tokens_of_packed_layers_are_the_stock_models(variant: str, tmp_path: Path):
    directory = tiny_models.save_random_config(VARIANTS[variant](), tmp_path)
    model = lean_model(directory, layout=WeightLayout.ONEDNN)
    assert model.report.weights.num_matrices == 4 * len(model.layers) + 1
    assert_exact(Checkpoint.of(directory), model)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_tokens_on_pages_of_any_size_are_the_stock_models(page_size: int, kernels: KernelUse, tmp_path: Path):
    directory = tiny_models.save_random_config(VARIANTS["mistral"](), tmp_path)
    assert_exact(Checkpoint.of(directory, page_size), lean_model(directory, kernels, page_size=page_size))


def test_the_bundled_models_tokens_are_the_stock_models(kernels: KernelUse):
    assert_exact(Checkpoint.of(MODEL_DIR), lean_model(MODEL_DIR, kernels))


@dataclass(frozen=True, slots=True)
class RoundedModel:
    """A bfloat16 model on disk, and the stock decoder's gap to a float32 copy of its weights."""

    directory: Path
    stock_gap: float

    @classmethod
    def of(cls, variant: str, directory: Path, seed: int) -> RoundedModel:
        tiny_models.save_random_config(VARIANTS[variant](), directory, dtype=torch.bfloat16, seed=seed)
        return cls(directory, bfloat16_gap(directory, DecoderChoice.STOCK, KernelUse.NEVER))


def bfloat16_gap(directory: Path, decoder: DecoderChoice, kernels: KernelUse) -> float:
    return load_model(directory, dtype=DtypeChoice.BFLOAT16, decoder=decoder, kernels=kernels).report.check.gap


@pytest.fixture(scope="module", params=sorted(set(VARIANTS) - {"llama-default-rope", "llama-no-groups"}))
def rounded_models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[RoundedModel]:
    """Three of a variant: for a single model, chance decides which decoder is closer. Made once for both kernels."""
    folder = tmp_path_factory.mktemp("rounded")
    return [RoundedModel.of(request.param, folder / str(seed), seed) for seed in range(3)]


def test_bfloat16_is_as_close_to_float32_as_the_stock_decoder_is(
    rounded_models: list[RoundedModel], kernels: KernelUse
):
    """Compares both with a float32 copy of the rounded weights, over chunks and single tokens."""
    gaps = [bfloat16_gap(model.directory, DecoderChoice.LEAN, kernels) for model in rounded_models]
    assert min(gaps) > 0.0
    ratios = [gap / model.stock_gap for gap, model in zip(gaps, rounded_models, strict=True)]
    assert statistics.median(ratios) <= 1.25, ratios


def test_lean_and_stock_decoders_read_each_others_pages(tmp_path: Path):
    """The decoders alternate step by step on one pool: every chunk and token attends to pages of both."""
    directory = tiny_models.save_random_config(VARIANTS["gemma3_text"](), tmp_path)
    checkpoint = Checkpoint.of(directory)
    lean = lean_model(directory)
    stock = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, decoder=DecoderChoice.STOCK)
    assert lean.geometry == stock.geometry
    storage = PageStorage.allocate(lean.geometry, NUM_PAGES)
    runner = RoundRobinRunner([ModelRunner(lean, storage), ModelRunner(stock, storage)])
    scheduler = RandomScheduler(runner, NUM_PAGES, PAGE_SIZE, 0, seed=3)
    assert scheduler.generate(checkpoint.prompts, NUM_NEW_TOKENS, GREEDY) == checkpoint.expected
    assert runner.num_steps > NUM_NEW_TOKENS
