"""The one-process pair's greedy tokens are those of transformers' `generate()`, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bundled import MODEL_DIR
from baton.domain.request import SamplingParams, StopParams
from baton.model.loading.config import DtypeChoice
from services.local.llm import LLM
from services.local.pair import PairLimits
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, make_prompts, stock_tokens
from tests.tiny_models import add_tokenizer, save_random_model

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8
GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("family", ["bundled", "llama", "gemma3_text"])
def test_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    directory = MODEL_DIR if family == "bundled" else add_tokenizer(save_random_model(family, tmp_path))
    prompts = make_prompts(PAGE_SIZE)
    limits = PairLimits(num_pages=128, max_rows=6, token_budget=3 * PAGE_SIZE)
    llm = LLM(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, limits=limits)
    completions = llm.generate(prompts, GREEDY, stop=StopParams(NUM_NEW_TOKENS))
    assert [list(completion.tokens) for completion in completions] == stock_tokens(directory, prompts)
