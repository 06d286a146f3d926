"""A `LocalPair` with every scheduling feature on: small pools, both tiers, pages given back, drafts, priorities.

What decides is deterministic: the step-time model is scripted, reads and writes of files end in the turn that starts
them, and pages move between the pools at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.domain.errors import BatonError, Cancelled
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import WorkerRole
from baton.engine.batch import Batch
from baton.engine.chunking import ChunkBudget, ChunkPolicy
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS, DraftPolicy
from baton.engine.drafts.registry import find_drafter
from baton.engine.handoff.cached_exports import CachedExports, ExportLimits
from baton.engine.handoff.export_commands import CommitExport, OpenExport, ReleaseExport
from baton.engine.handoff.import_commands import ExportAnswer
from baton.engine.handoff.import_effects import AbortHandoff, AskExport, AskVerdict, ConfirmCommit
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.page_imports import PageImportLimits, PageImports
from baton.engine.handoff.page_source import ImportCostModel, PageSource
from baton.engine.messages import Abort, Fail
from baton.engine.overlap.digest_thread import DigestThread
from baton.engine.overlap.page_fence import PageFence
from baton.engine.page_scrub import PageScrub
from baton.engine.pool.memory import empty_cache
from baton.engine.runner import ModelRunner, ModelStep
from baton.engine.step_metrics import monotonic_s
from baton.engine.tiers.controller import TierController, TierMover
from baton.engine.turn import EngineTurn
from baton.kv.eviction import EvictionPolicy
from baton.kv.geometry import PageWindow
from baton.kv.growth import GrowthPolicy, GrowthReserve
from baton.kv.keys import page_keys
from baton.kv.memory import PageMemory, write_leading
from baton.kv.page_checks import PageChecks
from baton.kv.page_tags import TagVerifier
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.kv.tiers.tier import CacheTier, SlotEntry
from baton.kv.tiers.tier_stack import TierStack
from baton.kv.windows.memory import WindowedMemory
from baton.model.loading.loader import LoadedModel
from baton.model.storage import PageStorage
from baton.services.decode.commands import Claim, Reserve
from baton.services.decode.effects import OutwardEffect
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import Busy, ImportLimits, Reserved
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.page_exports import PageExports
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.rows.order import RowOrder
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.rows.unsettled_pages import UnsettledRows
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.local.pair import (
    NO_DEADLINE_S,
    PREFILL,
    DirectReply,
    LocalPair,
    PairLimits,
    PairTokens,
)
from baton.services.prefill.commands import AddPrompt, PrefillEvent
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.overlap.scheduler import OverlapPrefillScheduler
from baton.services.prefill.overlap.steps import StepQueue
from baton.services.prefill.page_sharing import PageSharing
from baton.services.prefill.policy import PolicySettings, PrefillLimits, PrefillPolicy
from baton.services.prefill.scheduler import PrefillScheduler
from baton.settings.choices import PageSharingKind
from baton.settings.tiers import TierWrite
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.digest import PoolHasher, wrong_positions
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.mover import FileMover
from baton.transfer.file_tier.slot_file import SlotFile
from baton.transfer.host_tier.mover import HostMover
from simulation.runtime.step_time import ScriptedStepTime, attentive

DECODE = WorkerId("decode-local")
NUM_HOST_TIER_PAGES, NUM_FILE_TIER_PAGES = 24, 400
GROWTH_CLIP_TOKENS = 12
LONG_PROMPT_TOKENS = 16
IO_S = 60.0


class WaitedFileMover(FileMover):
    """The real threads and files; what is started has ended when the call returns."""

    def __init__(self, file: SlotFile, index: IndexLog, part_ends: Sequence[int]) -> None:
        self._moved = threading.Semaphore(0)
        super().__init__(file, index, part_ends, self._moved.release)

    def read(self, number: int, slots: Sequence[int]) -> None:
        super().read(number, slots)
        assert self._moved.acquire(timeout=IO_S)

    def write(self, entry: SlotEntry, page: bytes) -> None:
        super().write(entry, page)
        assert self._moved.acquire(timeout=IO_S)


class FullPair(LocalPair):
    """Both engines with everything on. `submit_turn` takes what a router would tell the workers.

    `ahead`: a step is started while the one before it runs, and its pages are hashed beside; there are no drafts then,
    as decode would start no step ahead.
    """

    def __init__(self, model: LoadedModel, limits: PairLimits, directory: Path, *, ahead: bool = False) -> None:
        self._directory = directory
        self._ahead = ahead
        self._digesters: list[DigestThread] = []
        self.num_ahead: Counter[WorkerRole] = Counter()
        self.num_busy = 0
        self.num_windowless = 0  # pages that were moved without their window part
        super().__init__(model, limits)

    @property
    def pools(self) -> tuple[PagePool, PagePool]:
        """The pools of prefill and decode."""
        return self.prefill._turn.cache.pool, self.decode._turn.cache.pool

    def close(self) -> None:
        """Ends the threads of the file tier and those that hash pages."""
        self._files.close(IO_S)
        for digester in self._digesters:
            digester.close()

    def submit_turn(
        self, name: str, prompt: tuple[int, ...], num_tokens: int, priority: int, num_shared: int, *, local: bool
    ) -> AttemptId | None:
        """Starts a greedy request; None while decode has no room. `num_shared`: leading tokens that decode may have.

        `local`: decode computes the prompt.
        """
        id = AttemptId(RequestId(name), 1)
        request = EngineRequest(
            id, prompt, len(prompt), SamplingParams(temperature=0.0), StopParams(num_tokens), priority=priority
        )
        reply: DirectReply[Reserved | Busy] = DirectReply()
        keys = tuple(page_keys(prompt, self._page_size, ""))
        self._decode_mailbox.put(Reserve(id, len(prompt), keys, NO_DEADLINE_S, reply, num_tokens, local))
        self.decode.turn()
        if isinstance(reply.answer, BatonError):
            raise reply.answer
        if not isinstance(reply.answer, Reserved):
            self.num_busy += 1
            return None
        source, now = None if local else PREFILL, monotonic_s()
        if not local:
            pages = PageSource(DECODE, Incarnation(1), WorkerRole.DECODE, num_shared // self._page_size, 1e9)
            self._prefill_mailbox.put(AddPrompt(request, reply.answer.prefix_len, NO_DEADLINE_S, now, pages))
        self._decode_mailbox.put(Claim(reply.answer.id, request, source, NO_DEADLINE_S, now))
        self._live.add(id)
        return id

    def abort_one(self, id: AttemptId) -> None:
        """A client hangs up."""
        self._prefill_mailbox.put(Abort(id, "gone"))
        self._decode_mailbox.put(Abort(id, "gone"))
        self._live.discard(id)

    def give_pages(self, pull: Pull) -> None:
        """The way back: copies pages from decode's pool into prefill's and checks their digests."""
        num_bytes, found = pull.page_bytes(self.prefill_memory), dict[int, int]()
        write_leading(self.prefill_memory, pull.local_pages, self.decode_memory.read(pull.remote_pages, num_bytes))
        assert pull.digests is not None
        every = slice(0, len(pull.local_pages))
        corrupt = wrong_positions(self.prefill_memory, pull, every, TagVerifier(OPEN_CLUSTER), found)
        outcome = PullOutcome.CORRUPT if corrupt else PullOutcome.DONE
        num_bytes *= len(pull.local_pages)
        ended = PullEvent(pull, outcome, num_bytes, 0.0, corrupt=tuple(corrupt), found=tuple(found.values()))
        self._prefill_mailbox.put(ended)

    def copy_pages(self, pull: Pull) -> None:
        """The transfer of a handoff, counted."""
        self.num_windowless += len(pull.local_pages) if pull.num_parts is not None else 0
        super().copy_pages(pull)

    def _on_event(self, event: PrefillEvent) -> Iterator[PairTokens]:
        match event:
            case AskExport(id, _, _, keys, first_page):
                reply: DirectReply[PublishedChunk] = DirectReply()
                self._decode_mailbox.put(OpenExport(id, keys, first_page, reply))
                self.decode.turn()
                assert reply.answer is not None
                self._prefill_mailbox.put(ExportAnswer(id, reply.answer))
            case Pull():
                self.give_pages(event)
            case ConfirmCommit(id):
                self._decode_mailbox.put(CommitExport(id, DirectReply()))
            case AbortHandoff(id):
                self._decode_mailbox.put(ReleaseExport(id, "the import ended"))
            case AskVerdict(_, _, _, message):
                raise AssertionError(message)
            case _:
                yield from super()._on_event(event)

    def _on_effect(self, effect: OutwardEffect) -> Iterator[PairTokens]:
        if not (isinstance(effect, Fail) and isinstance(effect.error, Cancelled)):
            yield from super()._on_effect(effect)

    def _digester(self, memory: PageMemory | WindowedMemory) -> DigestThread:
        digester = DigestThread(PoolHasher(memory))
        self._digesters.append(digester)
        return digester

    def _make_tiers(self, cache: PrefixCache) -> TierStack:
        memory = self.prefill_memory
        page_bytes, part_ends = memory.page_bytes, memory.part_ends
        index = IndexLog(self._directory, page_bytes, len(part_ends))
        self._files = WaitedFileMover(SlotFile(self._directory, page_bytes, NUM_FILE_TIER_PAGES), index, part_ends)
        movers: list[tuple[int, TierMover, TierWrite]] = [
            (NUM_HOST_TIER_PAGES, HostMover(PageMemory(NUM_HOST_TIER_PAGES, page_bytes, part_ends)), TierWrite.BACK),
            (NUM_FILE_TIER_PAGES, self._files, TierWrite.THROUGH),
        ]
        return TierStack(
            [
                TierController(
                    CacheTier(num_slots, num_parts=cache.pool.num_window_parts),
                    mover,
                    cache,
                    memory,
                    write,
                    lambda *_: 0.0,
                )
                for num_slots, mover, write in movers
            ]
        )

    def _make_prefill(self, limits: PairLimits) -> PrefillLoop:
        cache = empty_cache(self.prefill_memory, self._model.geometry, EvictionPolicy.SLRU)
        checks = PageChecks(cache)
        runner = ModelRunner(self._model, PageStorage.on_memory(self._model.geometry, self.prefill_memory))
        exports = ExportTable(cache.pool, NO_DEADLINE_S, grants_leases=False)
        rules = PrefillLimits(
            self._page_size,
            limits.token_budget,
            max_partial_prompts=4,
            max_pinned_pages=limits.num_pages // 2,
            long_prompt_tokens=LONG_PROMPT_TOKENS,
            order=PolicySettings(PrefillPolicy.SRPT, by_priority=True),
            leaves_a_quarter=True,
            equal_time=ScriptedStepTime(attentive),
        )
        costs = ImportCostModel(PageSharingKind.ALWAYS, self.prefill_memory.page_bytes, lambda num_pages, first: 0.0)
        imports = PageImports(cache, PageImportLimits(limits.num_pages // 4, 3, NO_DEADLINE_S), costs)
        sharing = PageSharing(self._make_tiers(cache), imports)
        make = OverlapPrefillScheduler if self._ahead else PrefillScheduler
        self.prefill_scheduler = make(cache, exports, rules, checks, None, sharing)
        turn = EngineTurn(WorkerRole.PREFILL, cache, self._prefill_mailbox, on_idle=lambda: None)
        scrub = PageScrub(checks, self.prefill_memory.page_bytes)
        loop = PrefillLoop(turn, self.prefill_scheduler, exports, runner, scrub, self._events.extend)
        if isinstance(self.prefill_scheduler, OverlapPrefillScheduler):

            def start(batch: Batch) -> ModelStep:
                self.num_ahead[WorkerRole.PREFILL] += 0 if loop.ahead is None else len(loop.ahead)
                return runner.start(batch)

            runner.overlaps = True
            digester = self._digester(self.prefill_memory)
            loop.ahead = StepQueue(self.prefill_scheduler, start, turn.steps, digester)
        return loop

    def _make_decode(self, limits: PairLimits) -> DecodeLoop:
        cache = empty_cache(self.decode_memory, self._model.geometry, EvictionPolicy.SLRU)
        host = PageMemory(limits.num_pages, self.decode_memory.page_bytes, self.decode_memory.part_ends)
        runner = ModelRunner(self._model, PageStorage.on_memory(self._model.geometry, self.decode_memory, host))
        cache.window = PageWindow.of(self._model.geometry)
        bounds = ImportLimits(
            self._page_size,
            limits.max_rows,
            3,
            NO_DEADLINE_S,
            window=cache.window,
            max_row_tokens=1 + MAX_DRAFT_TOKENS,
            max_chunk_tokens=limits.token_budget,
        )
        imports = ImportTable(cache, bounds)
        growth = GrowthReserve(GrowthPolicy.RATIO, self._page_size, GROWTH_CLIP_TOKENS)
        entry = find_drafter("ngram")
        assert entry is not None
        self.drafts = DraftPolicy(
            entry.make(self._model.config.vocab_size), MAX_DRAFT_TOKENS, self._page_size, cache.pool
        )
        chunks = ChunkBudget(limits.token_budget, self._page_size, ChunkPolicy.EQUAL, ScriptedStepTime(attentive))
        rows = RowRules(growth, None if self._ahead else self.drafts, RowOrder(by_priority=True))
        swap_space = SwapSpace(limits.num_pages, PoolHasher(host), cache.pool.num_window_parts)
        self.decode_scheduler = DecodeScheduler(imports, swap_space, self._page_size, chunks, rows)
        if self._ahead:
            fence = PageFence(cache.pool)
            ahead = OverlapScheduler(imports, swap_space, self._page_size, chunks, rows, fence)
            runner.overlaps = True
            ahead.unsettled = UnsettledRows(self._digester(self.decode_memory))
            self.decode_scheduler = ahead

        def start(batch: Batch) -> ModelStep:
            self.num_ahead[WorkerRole.DECODE] += any(row.future is not None for row in batch.rows)
            return runner.start(batch)

        checks, page_bytes = PageChecks(cache), self.decode_memory.page_bytes
        faults = PageFaults(cache, imports, self.decode_scheduler, checks, self._page_size, page_bytes)
        rules = ImportRules(self._page_size, digests=True)
        policy = ImportPolicy(cache.pool, imports, self.decode_scheduler, rules, faults, growth)
        turn = EngineTurn(WorkerRole.DECODE, cache, self._decode_mailbox, on_idle=lambda: None)
        exports = ExportTable(cache.pool, NO_DEADLINE_S)
        given = CachedExports(cache, exports, checks, ExportLimits(limits.num_pages // 4, policy.num_free_pages))
        hooks = DecodeHooks(
            self._effects.extend,
            self.copy_pages,
            PageScrub(checks, page_bytes),
            start if self._ahead else None,
            exports=PageExports(exports, given, policy),
        )
        return DecodeLoop(turn, imports, self.decode_scheduler, policy, runner, hooks)
