"""Greedy tokens of the real runner on pages equal those of the stock model's `generate()`, token for token.

Covers the stock decoder; `test_lean_exactness` covers the lean one.
"""

from __future__ import annotations

import random
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.bundled import MODEL_DIR
from baton.domain.request import SamplingParams
from baton.engine.runner import ModelRunner
from baton.kv.memory import PageMemory
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.exactness.answers.reference_answers import checkpoint_digest, remembered
from tests.exactness.random_scheduler import RandomScheduler

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8
NUM_PAGES = 1500
NUM_HOST_SLOTS = 16
NUM_NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0)


def make_prompts(page_size: int) -> list[list[int]]:
    """Shorter than a page, exact multiples, one off, many chunks, and three that share a prefix of full pages."""
    rng = random.Random(7)

    def some(num_tokens: int) -> list[int]:
        return [rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(num_tokens)]

    shared = some(4 * page_size)
    lengths = (1, 3, page_size, 2 * page_size, 2 * page_size + 1, 3 * page_size - 1, 9 * page_size, 61, 70)
    alone = [some(n) for n in lengths]
    return [*alone[:4], *(shared + some(n) for n in (0, 5, page_size)), *alone[4:]]


class StockModel:
    """The untouched model with eager attention, loaded for the first answer that no test of the run has asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digest = checkpoint_digest(directory)

    def generate(self, prompt: list[int]) -> list[int]:
        """`NUM_NEW_TOKENS` greedy tokens after `prompt`."""
        return remembered("stock", self._digest, prompt, NUM_NEW_TOKENS, partial(self._generate, prompt))

    @cached_property
    def _model(self) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self._directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        # The checkpoint's own generation config would end a sequence, or forbid its end, at the end-of-text token.
        model.generation_config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=NUM_NEW_TOKENS, pad_token_id=0
        )
        return model

    def _generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        generated: list[int] = self._model.generate(ids, attention_mask=torch.ones_like(ids))[0].tolist()
        return generated[len(prompt) :]


def stock_tokens(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """One prompt at a time through the untouched model, which decodes with a cache of its own."""
    model = StockModel(directory)
    outputs = [model.generate(prompt) for prompt in prompts]
    assert {len(output) for output in outputs} == {NUM_NEW_TOKENS}
    return outputs


def paged_scheduler(model: LoadedModel, seed: int) -> RandomScheduler:
    page_bytes = model.geometry.page_bytes
    storage = PageStorage.on_memory(
        model.geometry, PageMemory(NUM_PAGES, page_bytes), PageMemory(NUM_HOST_SLOTS, page_bytes)
    )
    return RandomScheduler(ModelRunner(model, storage), NUM_PAGES, model.geometry.page_size, NUM_HOST_SLOTS, seed)


def assert_exact(directory: Path, layout: WeightLayout, page_size: int = PAGE_SIZE) -> None:
    model = load_model(
        directory, dtype=DtypeChoice.FLOAT32, page_size=page_size, layout=layout, decoder=DecoderChoice.STOCK
    )
    prompts = make_prompts(page_size)
    scheduler = paged_scheduler(model, seed=11)
    expected = stock_tokens(directory, prompts)
    assert scheduler.generate(prompts, NUM_NEW_TOKENS, GREEDY) == expected
    assert len({token for output in expected for token in output}) > NUM_NEW_TOKENS, "greedy output is degenerate"
    coverage = scheduler.coverage
    assert min(coverage.mixed_steps, coverage.chunked_prompts, coverage.shared_pages, coverage.swapped_rows) > 2, (
        coverage
    )


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_random_models_give_the_stock_models_tokens(family: str, tmp_path: Path) -> None:
    assert_exact(tiny_models.save_random_model(family, tmp_path), WeightLayout.PLAIN)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_packed_layers_give_the_stock_models_tokens(family: str, tmp_path: Path) -> None:
    assert_exact(tiny_models.save_random_model(family, tmp_path), WeightLayout.ONEDNN)


@pytest.mark.parametrize("family", sorted(tiny_models.LATENT_FAMILIES.keys() - tiny_models.FAMILIES.keys()))
def test_latent_pages_give_the_stock_models_tokens(family: str, tmp_path: Path) -> None:
    """Every type with multi-head latent attention; the other two are in the test above."""
    assert_exact(tiny_models.save_random_config(tiny_models.LATENT_FAMILIES[family](), tmp_path), WeightLayout.ONEDNN)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_any_page_size_gives_the_stock_models_tokens(page_size: int, tmp_path: Path) -> None:
    assert_exact(tiny_models.save_random_model("mistral", tmp_path), WeightLayout.PLAIN, page_size)


def test_the_bundled_model_gives_the_stock_models_tokens() -> None:
    assert_exact(MODEL_DIR, WeightLayout.AUTO)


def test_sampled_tokens_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = load_model(tiny_models.save_random_model("llama", tmp_path), page_size=PAGE_SIZE, layout=WeightLayout.PLAIN)
    prompts = make_prompts(PAGE_SIZE)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=1234)
    together = paged_scheduler(model, seed=1).generate(prompts, NUM_NEW_TOKENS, sampling)
    alone = [paged_scheduler(model, seed=2).generate([prompt], NUM_NEW_TOKENS, sampling)[0] for prompt in prompts]
    assert together == alone
    assert together != paged_scheduler(model, seed=1).generate(prompts, NUM_NEW_TOKENS, SamplingParams(temperature=0.0))
