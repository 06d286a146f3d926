"""Pages that come back from a prefill worker's host tier give the tokens of `generate()`, also where copies rot."""

from __future__ import annotations

import pytest

from baton.bundled import MODEL_DIR
from baton.domain.request import SamplingParams, StopParams
from baton.engine.tiers.controller import TierController
from baton.kv.memory import PageMemory
from baton.kv.tiers.tier import CacheTier
from baton.model.loading.config import DtypeChoice
from baton.services.local import llm as local_llm
from baton.services.local.pair import LocalPair, PairLimits
from baton.services.prefill.loop import PrefillLoop
from baton.settings.tiers import TierWrite
from baton.telemetry import metrics
from baton.transfer.host_tier.mover import HostMover
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, make_prompts, stock_tokens

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8
LIMITS = PairLimits(num_pages=128, max_rows=6, token_budget=3 * PAGE_SIZE)


class TieredPair(LocalPair):
    """The pair with a host tier below its prefill side."""

    def _make_prefill(self, limits: PairLimits) -> PrefillLoop:
        loop, memory = super()._make_prefill(limits), self.prefill_memory
        self.slots = PageMemory(limits.num_pages, memory.page_bytes, memory.part_ends)
        self.prefill_cache = loop._turn.cache
        self.tier = CacheTier(limits.num_pages)
        mover = HostMover(self.slots)
        tier = TierController(self.tier, mover, self.prefill_cache, memory, TierWrite.BACK, lambda num, first: 0.0)
        loop._scheduler._tier, self.prefill_cache.on_evict = tier, tier.on_evict
        return loop


def from_host() -> float:
    return metrics.CACHED_TOKENS_TOTAL.labels("prefill", "host")._value.get()


def test_pages_from_host_memory_give_the_models_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_llm, "LocalPair", TieredPair)
    prompts = make_prompts(PAGE_SIZE)
    expected = stock_tokens(MODEL_DIR, prompts)
    llm = local_llm.LLM(MODEL_DIR, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, limits=LIMITS)
    pair = llm.pair
    assert isinstance(pair, TieredPair)

    def generate() -> list[list[int]]:
        """Answers after all cached pages were evicted."""
        pair.prefill_cache.clear()
        completions = llm.generate(prompts, SamplingParams(temperature=0.0), stop=StopParams(NUM_NEW_TOKENS))
        return [list(one.tokens) for one in completions]

    before = from_host()
    assert generate() == expected
    assert from_host() == before, "nothing was there"
    assert generate() == expected
    num_warm = from_host() - before
    assert num_warm >= sum((len(prompt) - 1) // PAGE_SIZE for prompt in prompts[7:]) * PAGE_SIZE
    pair.prefill_cache.clear()
    for slot in range(0, len(pair.tier), 3):
        pair.slots.page(slot)[5] ^= 1
    assert generate() == expected
    assert 0 < from_host() - before - num_warm < num_warm, "damaged copies are misses, the others hits"
