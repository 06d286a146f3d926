"""With int8 weights greedy tokens are those of the same int8 model on one prompt at a time, whole: every lean family.

Products give a row the same bits in every batch (`tests/property/test_int8_rows.py`); what is left is attention, whose
sums over a chunk and over single tokens differ in the last bits as they do with float weights.
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
from tests.cluster import Cluster, eventually
from tests.exactness.test_cluster_exactness import CHUNKS, PAGES, ask, shaped_prompts, split
from tests.exactness.test_lean_exactness import GREEDY, PAGE_SIZE, VARIANTS
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, make_prompts, paged_scheduler, stock_tokens
from tests.kernels import kernel_levels

pytestmark = [pytest.mark.exactness, pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")]


def int8_model(directory: Path) -> LoadedModel:
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, quantization=Quantization.INT8)
    assert isinstance(model.impl, LeanModel)
    assert model.report.quantization is not None
    return model


def tokens_alone(model: LoadedModel, prompt: list[int]) -> list[int]:
    """Without a cache: for every new token the whole text so far in one chunk, on pages in order."""
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


def test_they_are_not_the_float_models_tokens(tmp_path: Path):
    """Or nothing here would be about int8."""
    directory = tiny_models.save_random_model("llama", tmp_path)
    prompts = make_prompts(PAGE_SIZE)
    expected = stock_tokens(directory, prompts)
    assert paged_scheduler(int8_model(directory), seed=11).generate(prompts, NUM_NEW_TOKENS, GREEDY) != expected


@pytest.mark.integration
def test_a_cluster_answers_as_the_int8_model_and_a_float_worker_is_no_part_of_it(tmp_path: Path):
    """Pages of float weights and of int8 weights look alike, so only the workers' names for their weights differ."""
    model, prompts = int8_model(MODEL_DIR), shaped_prompts(9)
    expected = [tokens_alone(model, prompt) for prompt in prompts]
    assert expected != stock_tokens(MODEL_DIR, prompts)
    with Cluster(
        tmp_path, transport="stream", flags={**PAGES, "quantization": "int8"}, prefill_flags=CHUNKS
    ) as cluster:
        float_worker = cluster.start("decode", "decode-1", {"quantization": "none"})
        eventually(lambda: "link_failed" in float_worker.log.read_text(), 60.0, "the float worker has tried a link")
        assert "+int8 here" in float_worker.log.read_text()
        eventually(lambda: cluster.has_no_busy_pages("decode-1"), 60.0, "the float worker serves its metrics")
        with split(cluster):
            for _ in range(2):
                assert [ask(cluster, prompt) for prompt in prompts] == expected
        assert cluster.metric("decode-1", "baton_link_state") == 0
        assert cluster.metric("decode-1", "baton_transfer_bytes_total") == 0
