"""Over pages of int8 greedy tokens are those of the stock model with a cache that rounds K and V the same way.

The reference computes one prompt at a time and shares no code with the pages. So chunk cuts, batches, cached pages,
preemption and handoffs change nothing: every reader sees the rounded numbers, those of its own chunk included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.bundled import MODEL_DIR
from baton.model.attention.base import Segment, plan_step
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.cluster import Cluster
from tests.exactness.test_cluster_exactness import CHUNKS, PAGES, shaped_prompts
from tests.exactness.test_runner_exactness import GREEDY, NUM_NEW_TOKENS, make_prompts, paged_scheduler, stock_tokens
from tests.exactness.unlinked_worker import check_unlinked_worker

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8


def rounded(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] in steps of a 127th of each head's largest number."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (x / step).round() * step, 0.0)


class RoundedCache(transformers.DynamicCache):  # type: ignore[misc]  # transformers has no types here
    """K and V as pages of int8 keep them."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return super().update(rounded(key), rounded(value), *rest, **more)


def rounded_tokens(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, eos_token_id=None
    )
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=RoundedCache())
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def int8_pages(directory: Path, decoder: DecoderChoice, head_groups: int = 1) -> LoadedModel:
    model = load_model(
        directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, decoder=decoder, head_groups=head_groups
    )
    return model.with_int8_pages()


@pytest.mark.parametrize(
    ("family", "decoder"),
    [("bundled", DecoderChoice.LEAN), ("qwen3", DecoderChoice.LEAN), ("llama", DecoderChoice.STOCK)],
)
def test_tokens_are_those_of_a_rounded_cache(family: str, decoder: DecoderChoice, tmp_path: Path) -> None:
    directory = MODEL_DIR if family == "bundled" else tiny_models.save_random_model(family, tmp_path)
    model, prompts = int8_pages(directory, decoder, head_groups=2), make_prompts(PAGE_SIZE)
    scheduler = paged_scheduler(model, seed=11)
    answers = scheduler.generate(prompts, NUM_NEW_TOKENS, GREEDY)
    assert answers == rounded_tokens(directory, prompts, NUM_NEW_TOKENS)
    if family == "bundled":
        assert answers != stock_tokens(directory, prompts), "otherwise pages of floats would do, too"
    coverage = scheduler.coverage
    assert min(coverage.mixed_steps, coverage.chunked_prompts, coverage.shared_pages, coverage.swapped_rows) > 2


@pytest.mark.parametrize("decoder", [DecoderChoice.LEAN, DecoderChoice.STOCK])
def test_logits_are_those_of_a_rounded_cache_in_every_chunking(decoder: DecoderChoice) -> None:
    """They differ from the float cache's by more than a hundred times as much, and the cuts of chunks change little."""
    model = int8_pages(MODEL_DIR, decoder)
    prompt = make_prompts(PAGE_SIZE)[-1][:50]
    stock = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        plain, wanted = stock(ids).logits[0], stock(ids, past_key_values=RoundedCache()).logits[0]
    effect = (plain - wanted).square().mean().sqrt()
    for sizes in ([50], [17, 33], [8, 8, 1, 1, 32]):
        error = (paged_logits(model, prompt, sizes) - wanted).square().mean().sqrt()
        assert error < effect / 100, sizes


def paged_logits(model: LoadedModel, prompt: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits after every token of `prompt`, computed in chunks of these `sizes`."""
    table = list(range(model.geometry.num_pages(len(prompt))))[::-1]
    decoder = model.decoder(PageStorage.allocate(model.geometry, len(table)))
    logits, start = [], 0
    for size in sizes:
        step, places = plan_step([Segment(0, start, size, table)], PAGE_SIZE), torch.arange(size)
        logits.append(decoder.forward(torch.tensor(prompt[start : start + size]), places + start, step, places).clone())
        start += size
    return torch.cat(logits)


@pytest.mark.integration
def test_a_cluster_gives_these_tokens_and_links_no_worker_with_float_pages(tmp_path: Path) -> None:
    prompts = shaped_prompts(9)
    expected = rounded_tokens(MODEL_DIR, prompts, 12)
    flags = {**PAGES, "kv-dtype": "int8"}
    with Cluster(tmp_path, transport="stream", flags=flags, prefill_flags=CHUNKS) as cluster:
        why = "dtype: float32 in pages of int8 here, float32 there"
        check_unlinked_worker(cluster, {"kv-dtype": "auto"}, why, prompts, expected)
