"""The one-process pair's greedy tokens are those of transformers' `generate()`, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from baton.bundled import MODEL_DIR
from baton.domain.request import SamplingParams, StopParams
from baton.model.loading.config import DtypeChoice
from baton.services.local.llm import LLM
from baton.services.local.pair import PairLimits
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, make_prompts, stock_tokens
from tests.tiny_models import add_tokenizer, save_random_config, save_random_model, small_shape

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


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_tokens_do_not_depend_on_the_number_of_head_groups(family: str, tmp_path: Path) -> None:
    """4 KV heads in 1, 2 and 4 groups: through the native kernels, and through torch, which stock experts need."""
    config = {"llama": transformers.LlamaConfig, "gpt_oss": transformers.GptOssConfig}[family]
    more = {} if family == "llama" else {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    shape = small_shape(num_attention_heads=8, num_key_value_heads=4, **more)
    directory = add_tokenizer(save_random_config(config(**shape), tmp_path))
    prompts = make_prompts(PAGE_SIZE)
    expected = stock_tokens(directory, prompts)
    for head_groups in (1, 2, 4):
        limits = PairLimits(num_pages=128, max_rows=6, token_budget=3 * PAGE_SIZE)
        llm = LLM(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, head_groups=head_groups, limits=limits)
        completions = llm.generate(prompts, GREEDY, stop=StopParams(NUM_NEW_TOKENS))
        assert [list(completion.tokens) for completion in completions] == expected
