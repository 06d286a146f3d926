"""With fewer window slots than pages, greedy tokens are those of `generate()`. Free slots hold NaN.

Through chunks, prefix hits, rows beside one another, handoffs that move window parts only where they are read, and
preemption. A window part that is read after its slot was given back is NaN, and so is everything computed from it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.domain.request import SamplingParams, StopParams
from baton.model.loading.config import DtypeChoice
from baton.services.local.llm import LLM
from baton.services.local.pair import MAX_IDLE_STEPS, LocalPair, PairLimits
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, make_prompts, stock_tokens
from tests.exactness.windows.poison import poison_free_slots, window_slots
from tests.tiny_models import WINDOW, add_tokenizer, save_random_model

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8
NUM_ROW_SLOTS = WINDOW // PAGE_SIZE + 1
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(save_random_model(request.param, tmp_path_factory.mktemp(request.param)))


def check_idle(pair: LocalPair) -> None:
    for loop in (pair.prefill, pair.decode):
        loop._turn.cache.check()
        loop._turn.cache.pool.check()
        windows = window_slots(loop)
        assert (windows.num_held, windows.num_unreserved) == (0, windows.num_slots)


@pytest.mark.parametrize("num_window_slots", [7, 3 * NUM_ROW_SLOTS + 1, 60])
def test_tokens_equal_generate(directory: Path, num_window_slots: int):
    prompts = make_prompts(PAGE_SIZE)
    limits = PairLimits(128, max_rows=6, token_budget=3 * PAGE_SIZE, num_window_slots=num_window_slots)
    llm = LLM(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, limits=limits)
    poison_free_slots(llm.pair)
    for turn in range(2):  # the second time every prompt is cached, perhaps without window parts
        completions = llm.generate(prompts, GREEDY, stop=StopParams(NUM_NEW_TOKENS))
        assert [list(completion.tokens) for completion in completions] == stock_tokens(directory, prompts), turn
        check_idle(llm.pair)
    assert window_slots(llm.pair.prefill).num_evicted > 0 or num_window_slots == 60


def test_a_replay_goes_on_from_the_tokens_so_far(directory: Path):
    """The next attempt's prompt is cached, without the window parts that the first attempt has moved past."""
    prompts = make_prompts(PAGE_SIZE)[-3:]
    expected = stock_tokens(directory, prompts)
    limits = PairLimits(128, max_rows=6, token_budget=3 * PAGE_SIZE, num_window_slots=3 * NUM_ROW_SLOTS)
    llm = LLM(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, limits=limits)
    poison_free_slots(llm.pair)
    for num_emitted in (0, 1, NUM_NEW_TOKENS // 2, NUM_NEW_TOKENS - 1):
        for prompt, tokens in zip(prompts, expected, strict=True):
            emitted = tuple(tokens[:num_emitted])
            assert llm.pair.submit(tuple(prompt), GREEDY, StopParams(NUM_NEW_TOKENS), emitted=emitted) is not None
            answer = [one.token for part in llm.pair.run() for one in part.tokens]
            assert [*emitted, *answer] == tokens
    for _ in range(MAX_IDLE_STEPS):
        assert not list(llm.pair.step())
    check_idle(llm.pair)


def test_preempted_rows_come_back(directory: Path):
    """Decode has pages for a part of its rows only."""
    prompts = [prompt for prompt in make_prompts(PAGE_SIZE) if len(prompt) < 4 * PAGE_SIZE]
    limits = PairLimits(12, max_rows=6, token_budget=3 * PAGE_SIZE, num_window_slots=6 * NUM_ROW_SLOTS)
    llm = LLM(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, limits=limits)
    poison_free_slots(llm.pair)
    completions = llm.generate(prompts, GREEDY, stop=StopParams(NUM_NEW_TOKENS))
    assert [list(completion.tokens) for completion in completions] == stock_tokens(directory, prompts)
    assert llm.pair.decode._scheduler.num_preemptions > 0
    check_idle(llm.pair)
