"""The overlapped loops over the real runner give the tokens of the plain ones.

On a CPU a step has ended when `start` returns, so this shows that tokens reach the next step without the host, and that
sampling goes by their positions. That results are taken late is shown with `FakeAsyncRunner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.bundled import MODEL_DIR
from baton.domain.ids import AttemptId, PageId
from baton.domain.request import FinishReason, SamplingParams, StopParams
from baton.domain.worker import WorkerRole
from baton.engine.batch import Batch, Row
from baton.engine.chunking import ChunkBudget
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.overlap.digest_thread import DigestThread, PendingDigests
from baton.engine.overlap.page_fence import PageFence
from baton.engine.page_scrub import PageScrub
from baton.engine.runner import ModelRunner, ModelStep
from baton.engine.turn import EngineTurn
from baton.kv.memory import PageMemory
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from baton.model.storage import PageStorage
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.rows.unsettled_pages import UnsettledRows
from baton.services.local.pair import NO_DEADLINE_S, LocalPair, PairLimits
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.overlap.scheduler import OverlapPrefillScheduler
from baton.services.prefill.overlap.steps import StepQueue
from baton.services.prefill.policy import PrefillLimits
from baton.transfer.digest import PoolHasher
from tests import tiny_models
from tests.exactness.test_runner_exactness import make_prompts

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8
NUM_TOKENS = 20
LIMITS = PairLimits(num_pages=64, max_rows=6, token_budget=3 * PAGE_SIZE)


class CountedThread(DigestThread):
    """Counts the pages that it was given."""

    num_pages = 0

    def start(self, pages: Sequence[PageId]) -> PendingDigests:
        self.num_pages += len(pages)
        return super().start(pages)


class OverlapPair(LocalPair):
    """Both engines, one step ahead."""

    def start(self, batch: Batch) -> ModelStep:
        self.future_rows += [row for row in batch.rows if row.future is not None]
        return self.runner.start(batch)

    def start_prompts(self, batch: Batch) -> ModelStep:
        assert self.prefill.ahead is not None
        self.num_ahead += len(self.prefill.ahead)
        return self.prefill_runner.start(batch)

    def _make_prefill(self, limits: PairLimits) -> PrefillLoop:
        self.num_ahead = 0
        self.prefill_cache = cache = PrefixCache(PagePool(limits.num_pages), PoolHasher(self.prefill_memory))
        checks, exports = PageChecks(cache), ExportTable(cache.pool, NO_DEADLINE_S, grants_leases=False)
        self.prefill_runner = ModelRunner(self._model, PageStorage.on_memory(self._model.geometry, self.prefill_memory))
        self.prefill_runner.overlaps = True
        rules = PrefillLimits(self._page_size, limits.token_budget, limits.max_rows, limits.num_pages)
        scheduler = OverlapPrefillScheduler(cache, exports, rules, checks)
        turn = EngineTurn(WorkerRole.PREFILL, cache, self._prefill_mailbox, on_idle=lambda: None)
        scrub = PageScrub(checks, self.prefill_memory.page_bytes)
        loop = PrefillLoop(turn, scheduler, exports, self.prefill_runner, scrub, self._events.extend)
        self.digester = DigestThread(PoolHasher(self.prefill_memory))
        loop.ahead = StepQueue(scheduler, self.start_prompts, turn.steps, self.digester)
        return loop

    def _make_decode(self, limits: PairLimits) -> DecodeLoop:
        self.future_rows: list[Row] = []
        self.cache = cache = PrefixCache(PagePool(limits.num_pages), PoolHasher(self.decode_memory))
        host = PageMemory(limits.num_pages, self.decode_memory.page_bytes, self.decode_memory.part_ends)
        storage = PageStorage.on_memory(self._model.geometry, self.decode_memory, host)
        self.runner = ModelRunner(self._model, storage)
        self.runner.overlaps = True
        imports = ImportTable(cache, ImportLimits(self._page_size, limits.max_rows, limits.num_pages, NO_DEADLINE_S))
        swap_space, chunks = SwapSpace(limits.num_pages, PoolHasher(host)), ChunkBudget(0, self._page_size)
        self.scheduler = OverlapScheduler(imports, swap_space, self._page_size, chunks, None, PageFence(cache.pool))
        self.decode_digester = CountedThread(PoolHasher(self.decode_memory))
        self.scheduler.unsettled = UnsettledRows(self.decode_digester)
        checks, page_bytes = PageChecks(cache), self.decode_memory.page_bytes
        faults = PageFaults(cache, imports, self.scheduler, checks, self._page_size, page_bytes)
        policy = ImportPolicy(cache.pool, imports, self.scheduler, ImportRules(self._page_size, digests=True), faults)
        turn = EngineTurn(WorkerRole.DECODE, cache, self._decode_mailbox, on_idle=lambda: None)
        hooks = DecodeHooks(self._effects.extend, self.copy_pages, PageScrub(checks, page_bytes), self.start)
        return DecodeLoop(turn, imports, self.scheduler, policy, self.runner, hooks)


Answer = tuple[list[int], FinishReason | None]


def answers(pair: LocalPair, asked: Sequence[tuple[list[int], SamplingParams, StopParams]]) -> list[Answer]:
    """Tokens and ends, in the order of `asked`. A request that finds no room comes again when another has ended."""
    found: dict[AttemptId, Answer] = {}
    ids: list[AttemptId] = []
    waiting = list(asked)
    while waiting or any(finish is None for _, finish in found.values()):
        while waiting and (id := pair.submit(tuple(waiting[0][0]), *waiting[0][1:])) is not None:
            ids.append(id)
            found[id] = ([], None)
            del waiting[0]
        for part in pair.run():
            tokens, finish = found[part.id]
            assert finish is None, "a token behind the end"
            found[part.id] = ([*tokens, *(token.token for token in part.tokens)], part.finish)
    return [found[id] for id in ids]


@pytest.mark.parametrize("family", ["bundled", "qwen3"])
def test_tokens_equal_the_plain_loops(family: str, tmp_path: Path) -> None:
    directory = MODEL_DIR if family == "bundled" else tiny_models.save_random_model(family, tmp_path)
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_p=0.9, seed=7),
        SamplingParams(temperature=0.8, top_k=20, seed=1),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
    ]
    prompts = make_prompts(PAGE_SIZE)
    asked = [(prompt, kinds[at % 3], StopParams(NUM_TOKENS)) for at, prompt in enumerate(prompts)]
    plain = answers(LocalPair(model, LIMITS), asked)
    # Some now end at a token in the middle, and one row needs its tokens on the host.
    for at in (0, 3, 4, 7):
        prompt, sampling, _ = asked[at]
        asked[at] = (prompt, sampling, StopParams(NUM_TOKENS, stop_token_ids=frozenset(plain[at][0][9:10])))
    asked.append((prompts[5], kinds[3], StopParams(6)))
    plain, pair = answers(LocalPair(model, LIMITS), asked), OverlapPair(model, LIMITS)
    assert answers(pair, asked) == plain
    assert {finish for _, finish in plain} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len(pair.future_rows) > 5 * NUM_TOKENS
    assert 0 < pair.scheduler.num_dropped_tokens <= 4
    assert pair.num_ahead > 10
    pair.decode.turn()
    pair.digester.close()
    pair.decode_digester.close()
    assert pair.decode_digester.num_pages > len(asked) * NUM_TOKENS // PAGE_SIZE // 2
    assert pair.prefill_cache.pool.num_free + pair.prefill_cache.pool.num_cached == LIMITS.num_pages
    assert pair.cache.pool.num_free + pair.cache.pool.num_cached == LIMITS.num_pages
