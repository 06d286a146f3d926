"""How prompts share the token budget of steps, in arrival order."""

from __future__ import annotations

from baton.engine.fake_runner import SLOT_BYTES, FakeRunner
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from services.prefill.kv_export import ExportTable
from services.prefill.scheduler import PrefillLimits, PrefillScheduler
from simulation.runtime.page_memory import SimMemory
from tests.tiny_workers import VOCAB_SIZE, engine_request

NUM_PAGES = 512
PAGE_SIZE = 16


def packing(prompts: list[int], token_budget: int, max_partial_prompts: int = 4) -> list[list[int]]:
    """Tokens of each row of each step, until nothing can be scheduled. Prompts share no page."""
    memory = SimMemory(NUM_PAGES, PAGE_SIZE * SLOT_BYTES)
    cache = PrefixCache(PagePool(NUM_PAGES), None)
    limits = PrefillLimits(PAGE_SIZE, token_budget, max_partial_prompts, NUM_PAGES)
    scheduler = PrefillScheduler(cache, ExportTable(cache.pool, 9.0, True), limits, PageChecks(cache))
    runner = FakeRunner(memory, PAGE_SIZE, VOCAB_SIZE)
    for number, num_tokens in enumerate(prompts):
        scheduler.add(engine_request(f"r{number}", [0] * num_tokens, salt=str(number)), 0, 9.0)
    steps = []
    while (batch := scheduler.schedule(0.0)) is not None:
        steps.append([len(row.tokens) for row in batch.rows])
        scheduler.commit(batch, runner.run(batch), 0.0)
    return steps


def test_prompts_are_packed_in_arrival_order():
    steps = packing([4000, 1000, 500, 1200], 2000)
    assert steps == [[2000], [2000], [1000, 500, 496], [704]], "only a prompt's end may leave a page edge"


def test_short_prompts_fill_a_budget_whatever_the_bound():
    for max_partial_prompts in (1, 4):
        steps = packing([20] * 40, 512, max_partial_prompts)
        assert steps == [[20] * 25, [20] * 15]
