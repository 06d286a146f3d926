"""Tiny workers: a few small pages, two tokens, an exact model, and no threads.

The property tests build their prefill and decode sides here. Every side has the real bookkeeping and the fake runner,
which refuses a row whose page table does not match its history.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import Phase, settings

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import (
    EngineRequest,
    FinishReason,
    SampledToken,
    SamplingParams,
    StopParams,
    banned_tokens,
    finish_reason,
)
from baton.domain.timing.step_time import StepTimeModel
from baton.engine.batch import Batch, StepOutput
from baton.engine.chunking import ChunkBudget
from baton.engine.drafts.base import Drafter
from baton.engine.drafts.policy import DraftPolicy
from baton.engine.fake_runner import SLOT_BYTES, FakeRunner, fake_slots, fake_token
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.overlap.page_fence import SPARE_PAGES, PageFence
from baton.kv.geometry import PageWindow
from baton.kv.growth import GrowthReserve
from baton.kv.memory import PoolMemory
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Owner, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.kv.windows.memory import WindowedMemory
from baton.kv.windows.slots import WindowSlots
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.rows.order import RowOrder
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.prefill.policy import PolicySettings, PrefillLimits
from baton.services.prefill.scheduler import PrefillScheduler
from baton.transfer.digest import PoolHasher, page_digest
from simulation.runtime.page_memory import SimMemory
from tests.property.drafts.drafters import MadeDrafter

PAGE_SIZE = 2
NUM_PAGES = 8
PAGE_BYTES = PAGE_SIZE * SLOT_BYTES
VOCAB_SIZE = 2
MAX_DRAFTS = 5

REPEATABLE_SETTINGS = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
)
"""Draws the same examples in every run, so a red build is the change's fault."""

PLANTED_BUG_SETTINGS = settings(REPEATABLE_SETTINGS, max_examples=2000, phases=(Phase.generate,), print_blob=False)
"""For planted bugs, which need not be shrunk."""


SCRIPTED_SAMPLE = SampledToken(0)
WINDOW = PageWindow(3, PAGE_SIZE, 1)
"""Where a tiny pool has window slots."""


def tiny_memory(
    num_slots: int | None, pool: PagePool | None = None, memory: SimMemory | None = None
) -> tuple[PagePool, SimMemory, WindowedMemory | None]:
    """An empty pool, its pages, and these together with `num_slots` window parts."""
    pool, memory = pool or PagePool(NUM_PAGES), memory or SimMemory(NUM_PAGES, PAGE_BYTES)
    if num_slots is None:
        return pool, memory, None
    windowed = WindowedMemory(memory, SimMemory(num_slots, PAGE_BYTES))
    windowed.join(pool)
    return pool, memory, windowed


class PoisoningRunner(FakeRunner):
    """Fills free window slots with other bytes after every step. Until then a preempted row's copy may read them."""

    windows: tuple[WindowSlots, WindowedMemory] | None = None

    def run(self, batch: Batch) -> StepOutput:
        output = super().run(batch)
        if self.windows is not None:
            slots, memory = self.windows
            for slot in slots.free_slots:
                memory.windows.page(slot)[:] = b"\xff" * PAGE_BYTES
        return output


def tiny_runner(
    cache: PrefixCache, memory: SimMemory, windowed: WindowedMemory | None, host: SimMemory | None, drafter: object
) -> FakeRunner:
    runner = PoisoningRunner(
        windowed or memory,
        PAGE_SIZE,
        VOCAB_SIZE,
        host,
        make_drafts=drafter.make if isinstance(drafter, MadeDrafter) else None,
    )
    runner.window = cache.window
    if windowed is not None and cache.pool.windows is not None:
        runner.windows = cache.pool.windows, windowed
    return runner


def tiny_cache(pool: PagePool, memory: PoolMemory, windowed: WindowedMemory | None, digests: bool) -> PrefixCache:
    cache = PrefixCache(pool, PoolHasher(windowed or memory) if digests else None)
    cache.window = None if windowed is None else WINDOW
    return cache


@dataclass(frozen=True)
class TinyPrefill:
    """One prefill worker without its loop. Tests may replace the classes. `windowed`: with its window parts."""

    memory: SimMemory
    windowed: WindowedMemory | None
    cache: PrefixCache
    exports: ExportTable
    scheduler: PrefillScheduler
    runner: FakeRunner


@dataclass(frozen=True)
class TinyDecode:
    """One decode worker without its loop. Tests may replace the classes. `windowed`: with its window parts."""

    memory: SimMemory
    windowed: WindowedMemory | None
    host_memory: SimMemory
    cache: PrefixCache
    imports: ImportTable
    host: SwapSpace
    scheduler: DecodeScheduler
    import_policy: ImportPolicy
    runner: FakeRunner


def tiny_prefill(
    lease_s: float,
    token_budget: int = 2 * PAGE_SIZE,
    max_pinned_pages: int = NUM_PAGES // 2,
    max_partial_prompts: int = 2,
    export_table: type[ExportTable] = ExportTable,
    prefill_scheduler: type[PrefillScheduler] = PrefillScheduler,
    grants_leases: bool = False,
    long_prompt_tokens: int = 0,
    order: PolicySettings | None = None,
    equal_time: StepTimeModel | None = None,
    memory: SimMemory | None = None,
    pool: PagePool | None = None,
    num_window_slots: int | None = None,
) -> TinyPrefill:
    """`memory`, `pool`: empty, of `NUM_PAGES`, still without window slots; None: plain ones."""
    pool, memory, windowed = tiny_memory(num_window_slots, pool, memory)
    cache = tiny_cache(pool, memory, windowed, not grants_leases)
    exports = export_table(cache.pool, lease_s, grants_leases)
    limits = PrefillLimits(
        PAGE_SIZE, token_budget, max_partial_prompts, max_pinned_pages, long_prompt_tokens, order or PolicySettings(),
        equal_time=equal_time,
    )  # fmt: skip
    runner = tiny_runner(cache, memory, windowed, None, None)
    scheduler = prefill_scheduler(cache, exports, limits, PageChecks(cache))
    return TinyPrefill(memory, windowed, cache, exports, scheduler, runner)


def tiny_decode(
    digests: bool,
    num_host_pages: int,
    max_rows: int = 4,
    max_window_pages: int = 2,
    import_table: type[ImportTable] = ImportTable,
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler,
    import_policy: type[ImportPolicy] = ImportPolicy,
    token_budget: int = 0,
    page_faults: type[PageFaults] = PageFaults,
    growth: GrowthReserve | None = None,
    chunks: ChunkBudget | None = None,
    drafter: Drafter | None = None,
    order: RowOrder | None = None,
    pool: PagePool | None = None,
    num_window_slots: int | None = None,
    memory: SimMemory | None = None,
) -> TinyDecode:
    """`pool`, `memory`: empty, of `NUM_PAGES`, still without window slots; None: plain ones."""
    pool, memory, windowed = tiny_memory(num_window_slots, pool, memory)
    part_ends = (PAGE_BYTES,) if windowed is None else windowed.part_ends
    host_memory = SimMemory(max(1, num_host_pages), part_ends[-1], part_ends)
    cache = tiny_cache(pool, memory, windowed, digests)
    overlaps = issubclass(decode_scheduler, OverlapScheduler)
    limits = ImportLimits(
        PAGE_SIZE, max_rows, max_window_pages, pull_deadline_s=1.0, window=cache.window,
        max_row_tokens=max(2, 1 + MAX_DRAFTS if drafter else 0) + (SPARE_PAGES * PAGE_SIZE if overlaps else 0),
        max_chunk_tokens=token_budget,
    )  # fmt: skip
    imports = import_table(cache, limits)
    host = SwapSpace(num_host_pages, PoolHasher(host_memory) if digests else None, len(part_ends))
    chunks = chunks or ChunkBudget(token_budget, PAGE_SIZE)
    drafts = None if drafter is None else DraftPolicy(drafter, MAX_DRAFTS, PAGE_SIZE, cache.pool)
    rows = RowRules(growth, drafts, order or RowOrder())
    if issubclass(decode_scheduler, OverlapScheduler):
        scheduler: DecodeScheduler = decode_scheduler(imports, host, PAGE_SIZE, chunks, rows, PageFence(cache.pool))
    else:
        scheduler = decode_scheduler(imports, host, PAGE_SIZE, chunks, rows)
    faults = page_faults(cache, imports, scheduler, PageChecks(cache), PAGE_SIZE, PAGE_BYTES)
    policy = import_policy(cache.pool, imports, scheduler, ImportRules(PAGE_SIZE, digests), faults, growth)
    runner = tiny_runner(cache, memory, windowed, host_memory, drafter)
    return TinyDecode(memory, windowed, host_memory, cache, imports, host, scheduler, policy, runner)


def engine_request(
    name: str,
    prompt: list[int],
    *,
    attempt: int = 1,
    emitted: list[int] | None = None,
    stop: StopParams | None = None,
    seed: int = 0,
    salt: str = "",
    priority: int = 0,
) -> EngineRequest:
    """A request for this module's model, with the tokens of earlier attempts."""
    sampling = SamplingParams(temperature=1.0, seed=seed)
    tokens = (*prompt, *(emitted or []))
    id = AttemptId(RequestId(name), attempt)
    return EngineRequest(id, tokens, len(prompt), sampling, stop or StopParams(max_tokens=4), salt, priority=priority)


def next_token(request: EngineRequest, tokens: list[int]) -> tuple[int, FinishReason | None]:
    """The model's next token after `tokens`, which begin with the prompt, and whether it ends the sequence."""
    num_outputs = len(tokens) - request.num_prompt_tokens
    banned = banned_tokens(request.stop, num_outputs)
    token = fake_token(tokens, VOCAB_SIZE, request.sampling.seed, banned)
    return token, finish_reason(request.stop, token, num_outputs + 1)


def expected_output(request: EngineRequest) -> list[int]:
    """All tokens of the model alone after the prompt."""
    tokens, finish = list(request.tokens[: request.num_prompt_tokens]), None
    while finish is None:
        token, finish = next_token(request, tokens)
        tokens.append(token)
    return tokens[request.num_prompt_tokens :]


def page_bytes(tokens: tuple[int, ...], page: int) -> bytes:
    """Tokens of the page with index `page`; fewer than a page at their end."""
    return b"".join(fake_slots(tokens)[page * PAGE_SIZE : (page + 1) * PAGE_SIZE])


def true_digests(tokens: tuple[int, ...], first_page: int, end_page: int) -> tuple[int, ...]:
    """Digests of pages [first_page, end_page) as the model writes them; of a partial page any number."""
    return tuple(page_digest(memoryview(page_bytes(tokens, page))) for page in range(first_page, end_page))


def num_pages(num_tokens: int) -> int:
    return ceil_div(num_tokens, PAGE_SIZE)


def check_invariants(cache: PrefixCache) -> None:
    """Checks that the pool and the cache agree, and every page has exactly one owner."""
    cache.pool.check()
    cache.check()
    assert sum(cache.pool.counts().values()) == cache.pool.num_pages


def assert_idle(cache: PrefixCache) -> None:
    """Checks that every page is free or cached."""
    check_invariants(cache)
    assert cache.pool.num_free + cache.pool.num_cached == cache.pool.num_pages
    assert cache.pool.counts()[Owner.CACHED] == len(cache)
    if (windows := cache.pool.windows) is not None:
        assert (windows.num_held, windows.num_unreserved) == (0, windows.num_usable)
