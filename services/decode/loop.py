"""The decode engine's loop: take commands, schedule, run, commit, perform effects. Runs in the engine thread.

Owns import policy, imports, scheduler and the page pool. Every other thread sends commands through the mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.domain.errors import BatonError, Cancelled
from baton.domain.worker import WorkerLoad, WorkerRole
from baton.engine.batch import Batch, Runner, StepInFlight, StepOutput
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Abort, Fail
from baton.engine.step_metrics import StepMetrics, monotonic_s
from baton.kv.pages import Hold
from baton.kv.prefix_cache import PrefixCache
from baton.telemetry import metrics
from baton.transfer.base import Pull, PullOutcome
from services.decode.commands import (
    AllocateProbePages,
    ChunkArrived,
    Claim,
    CommitReplied,
    DecodeCommand,
    FreeProbePages,
    LeasesRenewed,
    Pulled,
    Reserve,
    SealArrived,
    SourceLost,
    SourceReplaced,
)
from services.decode.effects import (
    DecodeEffect,
    EmitTokens,
    OutwardEffect,
    Preempted,
    ReportImported,
    ReportLocalPrompt,
    StartPull,
)
from services.decode.import_policy import ImportPolicy
from services.decode.kv_import import ImportTable
from services.decode.scheduler import DecodeScheduler

IDLE_CHECK_S = 0.5
"""Quiet time after which the books are checked, once."""


class DecodeLoop:
    """One engine. `emit` receives each turn's effects for the outside, `submit` starts reads; neither may block.

    `start`, of a runner that returns before a step is done, lets a turn's effects go out while the next step runs.
    """

    def __init__(
        self,
        cache: PrefixCache,
        imports: ImportTable,
        scheduler: DecodeScheduler,
        import_policy: ImportPolicy,
        runner: Runner,
        max_rows: int,
        emit: Callable[[list[OutwardEffect]], None],
        submit: Callable[[Pull], None],
        on_idle: Callable[[], None],
        mailbox: Mailbox[DecodeCommand],
        start: Callable[[Batch], StepInFlight] | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._cache = cache
        self._imports = imports
        self._scheduler = scheduler
        self._import_policy = import_policy
        self._runner = runner
        self._max_rows = max_rows
        self._emit = emit
        self._submit = submit
        self._on_idle = on_idle
        self._start = start
        self._deferred: list[OutwardEffect] = []
        self._step_metrics = StepMetrics(WorkerRole.DECODE, cache.pool)
        self._busy = False
        self._pool_checked = False
        self._load = self._snapshot_load()

    def turn(self) -> bool:
        """One pass; waits for commands when no row can step. False when the mailbox has closed."""
        commands = self._mailbox.take_all(self._wait_s())
        if self._mailbox.closed:
            self._emit_effects(self._deferred)
            return False
        effects: list[DecodeEffect] = [*self._deferred, *(e for command in commands for e in self._handle(command))]
        self._deferred = []
        effects += self._import_policy.expire(monotonic_s())
        batch = self._scheduler.schedule(monotonic_s())
        self._busy = batch is not None
        if batch is not None:
            metrics.TOKENS_RECOMPUTED_TOTAL.inc(self._scheduler.num_recomputed_tokens(batch))
            with self._step_metrics.step():
                output, effects = self._run(batch, effects)
                effects += self._scheduler.commit(batch, output, monotonic_s())
        effects += self._scheduler.take_pending_effects()
        self._finish_turn(effects, idle=not commands and batch is None)
        return True

    def close(self) -> None:
        """Ends the loop after the current turn; may be called from any thread."""
        self._mailbox.close()

    def load(self) -> WorkerLoad:
        """The last turn's snapshot with the current step's age; may be called from any thread."""
        return replace(self._load, step_age_s=self._step_metrics.step_age_s())

    @property
    def num_requests(self) -> int:
        """Imports and rows; 0 means that nothing is lost by exiting."""
        return self._load.waiting_requests + self._load.running_rows

    def _wait_s(self) -> float | None:
        if self._busy:
            return 0.0
        wakeup = self._import_policy.next_wakeup()
        waits = [] if wakeup is None else [max(0.0, wakeup - monotonic_s())]
        return min(waits if self._pool_checked else [*waits, IDLE_CHECK_S], default=None)

    def _handle(self, command: DecodeCommand) -> list[DecodeEffect]:
        match command:
            case Reserve():
                return self._reserve(command)
            case Claim(reservation_id, request, source, deadline_s):
                return self._import_policy.claim(reservation_id, request, source, monotonic_s() + deadline_s)
            case ChunkArrived(id, first_page, pages, digests):
                return self._import_policy.on_chunk(id, first_page, pages, digests, monotonic_s())
            case SealArrived(id, seal):
                return self._import_policy.on_seal(id, seal, monotonic_s())
            case SourceLost(id, error):
                return self._import_policy.on_source_lost(id, error)
            case SourceReplaced(source):
                return self._import_policy.on_source_replaced(source)
            case LeasesRenewed(ids, lease_ends_at):
                self._import_policy.on_leases_renewed(ids, lease_ends_at)
                return []
            case Pulled(event):
                if event.outcome is PullOutcome.CORRUPT:
                    metrics.INTEGRITY_FAILURES_TOTAL.labels("page_digest").inc(len(event.corrupt))
                return self._import_policy.on_pull_event(event, monotonic_s())
            case CommitReplied(id, valid):
                effects = self._import_policy.on_commit_reply(id, valid, monotonic_s())
                if any(isinstance(effect, Fail) for effect in effects):
                    metrics.COMMIT_TOTAL.labels("invalid").inc()
                return effects
            case Abort(id, reason):
                return self._import_policy.fail(id, Cancelled(reason))
            case AllocateProbePages(num_pages, reply):
                room = num_pages <= self._imports.num_reservable_pages
                reply.send(self._cache.allocate(num_pages, Hold.DRAINING) if room else None)
                return []
            case FreeProbePages(pages):
                self._cache.pool.drop(pages, Hold.DRAINING)
                return []

    def _reserve(self, command: Reserve) -> list[DecodeEffect]:
        try:
            answer, effects = self._import_policy.reserve(
                command.id, command.num_tokens, command.keys, monotonic_s(), command.deadline_s
            )
        except BatonError as error:
            command.reply.send(error)
            return []
        command.reply.send(answer)
        return effects

    def _run(self, batch: Batch, effects: list[DecodeEffect]) -> tuple[StepOutput, list[DecodeEffect]]:
        """The step's output, and those of `effects` that did not go out while it ran."""
        with self._step_metrics.forward(batch):
            if self._start is None:
                return self._runner.run(batch), effects
            try:
                step = self._start(batch)
            finally:
                self._emit_effects(effects)
            return step.result(), []

    def _emit_effects(self, effects: Sequence[DecodeEffect]) -> None:
        outward = self._submit_pulls(effects)
        for effect in outward:
            self._count(effect)
        if outward:
            self._emit(outward)

    def _submit_pulls(self, effects: Sequence[DecodeEffect]) -> list[OutwardEffect]:
        """The other effects."""
        outward: list[OutwardEffect] = []
        for effect in effects:
            if isinstance(effect, StartPull):
                self._submit(effect.pull)
            else:
                outward.append(effect)
        return outward

    def _finish_turn(self, effects: Sequence[DecodeEffect], idle: bool) -> None:
        if idle and not self._pool_checked:
            self._cache.pool.check()
            self._cache.check()
        self._pool_checked = idle
        self._load = self._snapshot_load()
        self._step_metrics.update_gauges(len(self._imports))
        if self._start is not None and self._busy and self._scheduler.num_running:
            self._deferred = self._submit_pulls(effects)  # the next turn, at once, has a step to run beside
        else:
            self._emit_effects(effects)
        if self.num_requests == 0:
            self._on_idle()

    def _count(self, effect: OutwardEffect) -> None:
        match effect:
            case EmitTokens(_, tokens):
                metrics.GENERATED_TOKENS_TOTAL.labels("decode").inc(len(tokens))
            case ReportImported():
                metrics.COMMIT_TOTAL.labels(effect.proof.value).inc()
                metrics.PROMPT_TOKENS_TOTAL.labels("decode").inc(effect.num_prompt_tokens)
                metrics.CACHED_TOKENS_TOTAL.labels("decode", "device").inc(effect.num_cached_tokens)
            case ReportLocalPrompt():
                metrics.PROMPT_TOKENS_TOTAL.labels("decode").inc(effect.num_prompt_tokens)
                metrics.CACHED_TOKENS_TOTAL.labels("decode", "device").inc(effect.num_cached_tokens)
            case Preempted():
                metrics.PREEMPTIONS_TOTAL.labels("pages").inc()
            case _:
                pass

    def _snapshot_load(self) -> WorkerLoad:
        return WorkerLoad(
            waiting_requests=len(self._imports),
            waiting_tokens=self._scheduler.num_local_tokens,
            running_rows=self._scheduler.num_rows,
            max_rows=self._max_rows,
            available_pages=max(0, self._imports.num_reservable_pages),
            total_pages=self._cache.pool.num_pages,
        )
