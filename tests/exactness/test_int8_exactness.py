"""With int8 weights greedy tokens equal those of the same int8 model on one prompt at a time, for every lean family.

A row's products have the same bits in every batch (`tests/property/kv/test_int8_rows.py`). Only attention sums over a
chunk and over single tokens differ in the last bits, as with float weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.bundled import MODEL_DIR
from baton.model.attention.base import Segment, plan_step
from baton.model.decoders.lean_weights import LeanModel
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.loading.quantization import Quantization
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.cluster import Cluster
from tests.exactness.test_cluster_exactness import CHUNKS, PAGES, shaped_prompts
from tests.exactness.test_lean_exactness import GREEDY, PAGE_SIZE, VARIANTS
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, make_prompts, paged_scheduler, stock_tokens
from tests.exactness.unlinked_worker import check_unlinked_worker
from tests.kernels import kernel_levels

pytestmark = [pytest.mark.exactness, pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")]


def int8_model(directory: Path) -> LoadedModel:
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, quantization=Quantization.INT8)
    assert isinstance(model.impl, LeanModel)
    assert model.report.quantization is not None
    return model


def tokens_alone(model: LoadedModel, prompt: list[int]) -> list[int]:
    """Computes without a cache: the whole text so far in one chunk for every new token, on pages in order."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + NUM_NEW_TOKENS:
        num_pages = model.geometry.num_pages(len(tokens))
        step = plan_step([Segment(0, 0, len(tokens), list(range(num_pages)))], PAGE_SIZE)
        decoder = model.decoder(PageStorage.allocate(model.geometry, num_pages))
        last = torch.tensor([len(tokens) - 1])
        logits = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), step, last)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("variant", ["bundled", *sorted(VARIANTS)])
def test_tokens_are_those_of_one_prompt_at_a_time(variant: str, tmp_path: Path):
    bundled = variant == "bundled"
    directory = MODEL_DIR if bundled else tiny_models.save_random_config(VARIANTS[variant](), tmp_path)
    model, prompts = int8_model(directory), make_prompts(PAGE_SIZE)
    expected = [tokens_alone(model, prompt) for prompt in prompts]
    scheduler = paged_scheduler(model, seed=11)
    assert scheduler.generate(prompts, NUM_NEW_TOKENS, GREEDY) == expected
    assert len({token for output in expected for token in output}) > NUM_NEW_TOKENS, "greedy output is degenerate"
    coverage = scheduler.coverage
    assert min(coverage.mixed_steps, coverage.chunked_prompts, coverage.shared_pages, coverage.swapped_rows) > 2, (
        coverage
    )


def test_tokens_differ_from_the_float_models(tmp_path: Path):
    """Proves that these tests cover int8 weights."""
    directory = tiny_models.save_random_model("llama", tmp_path)
    prompts = make_prompts(PAGE_SIZE)
    expected = stock_tokens(directory, prompts)
    assert paged_scheduler(int8_model(directory), seed=11).generate(prompts, NUM_NEW_TOKENS, GREEDY) != expected


@pytest.mark.integration
def test_a_cluster_gives_int8_tokens_and_links_no_float_worker(tmp_path: Path):
    """Pages of float and of int8 weights look alike; only the workers' fingerprints differ."""
    model, prompts = int8_model(MODEL_DIR), shaped_prompts(10)
    expected = [tokens_alone(model, prompt) for prompt in prompts]
    with Cluster(
        tmp_path, transport="stream", flags={**PAGES, "quantization": "int8"}, prefill_flags=CHUNKS
    ) as cluster:
        why = "quantization: int8 here, none there"
        check_unlinked_worker(cluster, {"quantization": "none"}, why, prompts, expected)
