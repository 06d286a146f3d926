"""One prefill engine and one decode engine, turned by hand: the real loops without threads, sockets or a store.

A request's life here is the one of the cluster:

1. `submit` reserves pages and a row at decode, then posts the prompt to prefill and the claim to decode.
2. `step` turns prefill once. Published chunks and the seal go to decode; the seal brings the first token.
3. `step` turns decode once. A pull copies pages from pool to pool in `copy_pages` and is checked by its digests. The
   commit goes back to prefill, which unpins.
4. Every later `step` yields decode's tokens until one of them finishes the request.

Called by `LLM`. Knows tokens, no text. A prompt's pages pass through `copy_pages`, the place for a breakpoint.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from baton.domain.errors import BatonError, Broken, IntegrityFailure
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, RequestId, WorkerId
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest, FinishReason, OutputToken, SamplingParams, StopParams
from baton.domain.scores.prompt_scores import PromptScores, join_scores
from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import WorkerRole
from baton.engine.chunking import ChunkBudget
from baton.engine.handoff.export_commands import CommitExport, ReleaseExport
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.import_effects import AbortHandoff, AskVerdict, ConfirmCommit
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.mailbox import Mailbox
from baton.engine.media.step_inputs import EmbeddingSource
from baton.engine.messages import Abort, Fail, Scored
from baton.engine.page_scrub import PageScrub
from baton.engine.pool.memory import empty_cache
from baton.engine.reply import Reply
from baton.engine.runner import ModelRunner
from baton.engine.step_metrics import monotonic_s
from baton.engine.turn import EngineTurn
from baton.kv.geometry import PageWindow
from baton.kv.keys import page_keys
from baton.kv.memory import PageMemory, write_leading
from baton.kv.page_checks import PageChecks
from baton.kv.page_tags import TagVerifier
from baton.kv.swap_space import SwapSpace
from baton.kv.windows.memory import WindowedMemory
from baton.model.loading.loader import LoadedModel
from baton.model.storage import PageStorage
from baton.services.decode.commands import Claim, DecodeCommand, Reserve, SealArrived
from baton.services.decode.effects import EmitTokens, OutwardEffect
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import Busy, ImportLimits, Reserved, SealInfo
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.prefill.commands import AddPrompt, PrefillCommand, PrefillEvent
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.policy import PrefillLimits
from baton.services.prefill.scheduler import PrefillScheduler
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.digest import PoolHasher, wrong_positions

Command = TypeVar("Command")
Answer = TypeVar("Answer")
PREFILL = WorkerId("prefill-local")
NO_DEADLINE_S = 1e9
"""Deadlines and leases must outlast a pause in a debugger."""
MAX_IDLE_STEPS = 3


class PolledMailbox(Mailbox[Command]):
    """A mailbox that never waits: a turn without commands goes on to compute."""

    def take_all(self, timeout_s: float | None) -> list[Command]:
        return super().take_all(0.0)


class DirectReply(Reply[Answer], Generic[Answer]):
    """A reply that is read after the turn that sent it."""

    def __init__(self) -> None:
        self.answer: Answer | BatonError | None = None

    def send(self, answer: Answer | BatonError) -> None:
        self.answer = answer


@dataclass(frozen=True, slots=True)
class PairLimits:
    """Pools of `num_pages` each; `max_rows` decode at once; prefill computes `token_budget` tokens a step.

    `num_window_slots`: of each pool; None: window parts are in their pages.
    """

    num_pages: int = 512
    max_rows: int = 16
    token_budget: int = 256
    num_window_slots: int | None = None


@dataclass(frozen=True, slots=True)
class PairTokens:
    """New tokens of one request; `finish` comes with the last, `scores` of its prompt with the first."""

    id: AttemptId
    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None
    scores: PromptScores | None = None


class LocalPair:
    """Both engines over one loaded model and two page pools."""

    def __init__(self, model: LoadedModel, limits: PairLimits, embeddings: EmbeddingSource | None = None) -> None:
        """`embeddings`: of the images in prompts. Only prefill needs them."""
        self._model = model
        self._embeddings = embeddings
        self._page_size = model.geometry.page_size
        self.prefill_memory = _memory(model, limits)
        self.decode_memory = _memory(model, limits)
        self._prefill_mailbox: PolledMailbox[PrefillCommand] = PolledMailbox(1024)
        self._decode_mailbox: PolledMailbox[DecodeCommand] = PolledMailbox(1024)
        self._events: deque[PrefillEvent] = deque()
        self._effects: deque[OutwardEffect] = deque()
        self.prefill = self._make_prefill(limits)
        self.decode = self._make_decode(limits)
        self._live: set[AttemptId] = set()
        self._scores: dict[AttemptId, list[PromptScores]] = {}

    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        stop: StopParams,
        prompt_logprobs: int | None = None,
        media: tuple[MediaSpan, ...] = (),
        emitted: tuple[int, ...] = (),
    ) -> AttemptId | None:
        """Starts a request; None while decode has no room. Raises `ContextOverflow` for one that can never fit.

        `media`: spans of the prompt, whose embeddings the pair was given. `emitted`: tokens of an earlier attempt.
        """
        id = AttemptId(RequestId(uuid.uuid4().hex), 1)
        tokens = prompt + emitted
        request = EngineRequest(id, tokens, len(prompt), sampling, stop, prompt_logprobs=prompt_logprobs, media=media)
        reply: DirectReply[Reserved | Busy] = DirectReply()
        keys = tuple(page_keys(tokens, self._page_size, "", media))
        self._decode_mailbox.put(Reserve(id, len(tokens), keys, NO_DEADLINE_S, reply))
        self.decode.turn()
        if isinstance(reply.answer, BatonError):
            raise reply.answer
        if not isinstance(reply.answer, Reserved):
            return None
        self._prefill_mailbox.put(AddPrompt(request, reply.answer.prefix_len, NO_DEADLINE_S, monotonic_s()))
        self._decode_mailbox.put(Claim(reply.answer.id, request, PREFILL, NO_DEADLINE_S, monotonic_s()))
        self._live.add(id)
        return id

    def step(self) -> Iterator[PairTokens]:
        """One turn of prefill, then one of decode; yields the tokens they chose. Raises a request's `BatonError`."""
        self.prefill.turn()
        while self._events:
            yield from self._on_event(self._events.popleft())
        self.decode.turn()
        while self._effects:
            yield from self._on_effect(self._effects.popleft())

    def run(self) -> Iterator[PairTokens]:
        """Steps until a request has finished, or none is live. Raises `Broken` when nothing moves any more."""
        num_idle = 0
        while self._live:
            tokens = list(self.step())
            yield from tokens
            if any(part.finish is not None for part in tokens):
                return
            loads = (self.prefill.load(), self.decode.load())
            is_busy = bool(tokens) or any(load.running_rows or load.waiting_requests for load in loads)
            num_idle = 0 if is_busy else num_idle + 1
            if num_idle > MAX_IDLE_STEPS:
                raise Broken(f"{len(self._live)} requests are live and neither engine has work")

    def abort(self) -> None:
        """Ends every live request."""
        for id in self._live:
            self._prefill_mailbox.put(Abort(id, "stopped"))
            self._decode_mailbox.put(Abort(id, "stopped"))
        self._live.clear()
        self._scores.clear()
        for _ in range(MAX_IDLE_STEPS):
            self.prefill.turn()
            self.decode.turn()
            self._events.clear()
            self._effects.clear()

    def copy_pages(self, pull: Pull) -> None:
        """The transfer: copies pages from prefill's pool into decode's and checks their digests."""
        every, found = slice(0, len(pull.local_pages)), dict[int, int]()
        num_bytes = pull.page_bytes(self.decode_memory)
        contents = self.prefill_memory.read(pull.remote_pages, num_bytes)
        write_leading(self.decode_memory, pull.local_pages, contents)
        corrupt = wrong_positions(self.decode_memory, pull, every, TagVerifier(OPEN_CLUSTER), found)
        outcome = PullOutcome.CORRUPT if corrupt else PullOutcome.DONE
        num_bytes *= len(pull.local_pages)
        ended = PullEvent(pull, outcome, num_bytes, 0.0, corrupt=tuple(corrupt), found=tuple(found.values()))
        self._decode_mailbox.put(ended)

    def _on_event(self, event: PrefillEvent) -> Iterator[PairTokens]:
        match event:
            case PublishedChunk():
                self._decode_mailbox.put(event)
            case Seal(id, index, first, finish):
                self._decode_mailbox.put(SealArrived(id, SealInfo(first, finish, event.num_pages)))
                parts = self._scores.pop(id, None)
                tokens = self._tokens(id, (OutputToken(index, first.token, first.logprobs),), finish)
                yield tokens if parts is None else replace(tokens, scores=join_scores(parts))
            case Scored(id, scores):
                self._scores.setdefault(id, []).append(scores)
            case Fail(_, error):
                raise error

    def _on_effect(self, effect: OutwardEffect) -> Iterator[PairTokens]:
        match effect:
            case EmitTokens(id, tokens, finish):
                yield self._tokens(id, tokens, finish)
            case ConfirmCommit(id):
                self._prefill_mailbox.put(CommitExport(id, DirectReply()))
            case AbortHandoff(id):
                self._prefill_mailbox.put(ReleaseExport(id, "the import ended"))
            case AskVerdict(_, _, _, message):
                raise IntegrityFailure(message)
            case Fail(_, error):
                raise error

    def _tokens(self, id: AttemptId, tokens: tuple[OutputToken, ...], finish: FinishReason | None) -> PairTokens:
        if finish is not None:
            self._live.discard(id)
        return PairTokens(id, tokens, finish)

    def _make_prefill(self, limits: PairLimits) -> PrefillLoop:
        cache = empty_cache(self.prefill_memory, self._model.geometry)
        checks = PageChecks(cache)
        storage = PageStorage.on_memory(self._model.geometry, self.prefill_memory)
        runner = ModelRunner(self._model, storage, embeddings=self._embeddings)
        exports = ExportTable(cache.pool, NO_DEADLINE_S, grants_leases=False)
        media = self._model.config.media
        whole = media is not None and media.block_rows is not None
        rules = PrefillLimits(
            self._page_size, limits.token_budget, limits.max_rows, limits.num_pages, whole_images=whole
        )
        scheduler = PrefillScheduler(cache, exports, rules, checks)
        turn = EngineTurn(WorkerRole.PREFILL, cache, self._prefill_mailbox, on_idle=lambda: None)
        scrub = PageScrub(checks, self.prefill_memory.page_bytes)
        return PrefillLoop(turn, scheduler, exports, runner, scrub, self._events.extend)

    def _make_decode(self, limits: PairLimits) -> DecodeLoop:
        cache = empty_cache(self.decode_memory, self._model.geometry)
        host = PageMemory(limits.num_pages, self.decode_memory.page_bytes, self.decode_memory.part_ends)
        runner = ModelRunner(self._model, PageStorage.on_memory(self._model.geometry, self.decode_memory, host))
        cache.window = PageWindow.of(self._model.geometry)
        imports = ImportTable(
            cache,
            ImportLimits(
                self._page_size,
                limits.max_rows,
                limits.num_pages,
                NO_DEADLINE_S,
                window=cache.window,
                max_chunk_tokens=limits.token_budget,
            ),
        )
        swap_space = SwapSpace(limits.num_pages, PoolHasher(host), cache.pool.num_window_parts)
        scheduler = DecodeScheduler(
            imports, swap_space, self._page_size, ChunkBudget(limits.token_budget, self._page_size)
        )
        checks, page_bytes = PageChecks(cache), self.decode_memory.page_bytes
        faults = PageFaults(cache, imports, scheduler, checks, self._page_size, page_bytes)
        rules = ImportRules(self._page_size, digests=True)
        policy = ImportPolicy(cache.pool, imports, scheduler, rules, faults)
        turn = EngineTurn(WorkerRole.DECODE, cache, self._decode_mailbox, on_idle=lambda: None)
        hooks = DecodeHooks(self._effects.extend, self.copy_pages, PageScrub(checks, page_bytes))
        return DecodeLoop(turn, imports, scheduler, policy, runner, hooks)


def _memory(model: LoadedModel, limits: PairLimits) -> PageMemory | WindowedMemory:
    geometry, num_slots = model.geometry, limits.num_window_slots
    if num_slots is None:
        return PageMemory(limits.num_pages, geometry.page_bytes, geometry.part_ends)
    return WindowedMemory.allocate(limits.num_pages, num_slots, geometry.part_ends)
