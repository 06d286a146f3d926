"""The decode engine's loop: take commands, schedule, run, commit, perform effects. Runs in the engine thread.

Owns import policy, imports, scheduler and the page pool. Every other thread sends commands through the mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.domain.errors import BatonError, Broken, Cancelled
from baton.domain.handoff import PublishedChunk
from baton.domain.timing.attempt_times import to_us
from baton.domain.worker import Activity, WorkerBudgets, WorkerLoad
from baton.engine.batch import Batch, Runner, StepInFlight, StepOutput
from baton.engine.drafts.meter import DraftMeter
from baton.engine.handoff.export_commands import CommitExport, OpenExport, ReleaseExport, RenewLeases
from baton.engine.handoff.import_commands import (
    AllocateProbePages,
    CommitReplied,
    FreeProbePages,
    LeasesRenewed,
    QuarantineArrived,
    SourceReplaced,
    VerdictArrived,
)
from baton.engine.messages import Abort, Fail, Scored
from baton.engine.overlap.started_step import StartedStep
from baton.engine.page_scrub import PageScrub
from baton.engine.step_metrics import monotonic_s
from baton.engine.turn import EngineTurn
from baton.kv.pages import Hold
from baton.services.decode.commands import Claim, DecodeCommand, Reserve, SealArrived, SourceLost
from baton.services.decode.effects import DecodeEffect, EmitTokens, OutwardEffect, ReportImported
from baton.services.decode.import_policy import ImportPolicy
from baton.services.decode.import_table import ImportTable
from baton.services.decode.page_exports import PageExports
from baton.services.decode.rows.join_gate import JOINS_WITHIN_S, JoinGate
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.rows.send_back import SendBackReason
from baton.services.decode.scheduler import DecodeScheduler
from baton.telemetry import metrics
from baton.transfer.base import Pull, PullEvent
from baton.worker.budget_control import ChangeBudgets


@dataclass(frozen=True, slots=True)
class DecodeHooks:
    """Outputs of the loop. `emit` takes effects for the asyncio loop, `submit` starts a read; neither blocks.

    `scrub` checks idle pages and reports wrong ones. `start` begins a step and returns before it is done: effects of
    one turn are then emitted while the next step runs. An `OverlapScheduler` needs it. `exports`: gives cached pages to
    other workers; None: it gives none. `meter` publishes what became of drafts.
    """

    emit: Callable[[list[OutwardEffect]], None]
    submit: Callable[[Pull], None]
    scrub: PageScrub
    start: Callable[[Batch], StepInFlight] | None = None
    exports: PageExports | None = None
    meter: DraftMeter | None = None


class DecodeLoop:
    """The loop of one decode engine."""

    def __init__(
        self,
        turn: EngineTurn[DecodeCommand],
        imports: ImportTable,
        scheduler: DecodeScheduler,
        import_policy: ImportPolicy,
        runner: Runner,
        hooks: DecodeHooks,
    ) -> None:
        self._turn = turn
        self._imports = imports
        self._scheduler = scheduler
        self._import_policy = import_policy
        self._runner = runner
        self._hooks = hooks
        self._exports = hooks.exports
        self._ahead = scheduler if isinstance(scheduler, OverlapScheduler) else None
        self._join_gate = JoinGate()
        self._in_flight: StartedStep | None = None
        self._result_at = 0.0  # when the last result of a step was taken
        self._deferred: list[OutwardEffect] = []
        self._num_send_backs = dict.fromkeys(SendBackReason, 0)
        self._send_backs = {reason: metrics.SEND_BACKS_TOTAL.labels(reason.value) for reason in SendBackReason}
        self._damaged_copies = metrics.INTEGRITY_FAILURES_TOTAL.labels("host_copy")
        self._preemptions = metrics.PREEMPTIONS_TOTAL.labels("pages")
        self._generated = metrics.GENERATED_TOKENS_TOTAL.labels("decode")
        self._num_given = self._num_dropped_tokens = 0
        self._num_preemptions = self._num_local_prompt_tokens = self._num_local_cached_tokens = 0
        self._budgets = import_policy.budgets
        turn.publish(self._snapshot_load(), 0)

    def turn(self) -> bool:
        """Runs one turn; waits for commands when no row can step. False once the mailbox is closed."""
        commands = self._turn.take_commands(self._next_wakeup(monotonic_s()))
        if self._turn.mailbox.closed:
            self._emit_effects([*self._deferred, *self._take_result(self._in_flight)])
            return False
        effects: list[DecodeEffect] = [*self._deferred, *(e for command in commands for e in self._handle(command))]
        self._deferred = []
        effects += self._import_policy.expire(monotonic_s())
        if self._exports is not None:
            self._exports.expire(monotonic_s())
        effects += self._import_policy.check_pages(monotonic_s())
        idle = not commands and self._in_flight is None
        if self._ahead is not None:
            batch, effects = self._step_ahead(self._ahead, effects)
        elif self._holds():
            batch, idle, effects = None, False, [_joined(effect) for effect in effects]
        else:
            batch, effects = self._step(effects)
        effects += self._scheduler.take_pending_effects()
        effects += self._scrub(monotonic_s())
        self._count_decisions()
        self._finish_turn(effects, stepped=batch is not None, idle=idle and batch is None)
        return True

    def _holds(self) -> bool:
        """True while the next step waits for rows that are about to join."""
        now, last_step_s = monotonic_s(), self._turn.steps.last_forward_s
        num_joining = self._imports.num_joining(since=now - JOINS_WITHIN_S)
        return self._join_gate.holds(num_joining, self._scheduler.num_rows, last_step_s, now)

    def _step(self, effects: list[DecodeEffect]) -> tuple[Batch | None, list[DecodeEffect]]:
        """Runs a step to its end. Returns its batch, None if there was none, and the effects that are left to emit."""
        batch = self._scheduler.schedule(monotonic_s())
        effects = [_joined(effect) for effect in effects]
        if batch is not None:
            self._join_gate.on_step()
            self._count_recomputed(batch)
            with self._turn.steps.step():
                output, effects = self._run(batch, effects)
                effects += self._scheduler.commit(batch, output, monotonic_s())
        return batch, effects

    def _step_ahead(
        self, ahead: OverlapScheduler, effects: list[DecodeEffect]
    ) -> tuple[Batch | None, list[DecodeEffect]]:
        """Starts a step, then takes the result of the one before; the other way round where the next one needs it.

        Returns the batch that was started, None if there was none, and the effects that are left to emit.
        """
        before, batch = self._in_flight, ahead.schedule_ahead(monotonic_s())
        effects = [_joined(effect) for effect in effects]
        if batch is None:
            if before is not None:
                self._emit_effects(effects)
                effects = self._take_result(before)
            before, batch = None, ahead.schedule(monotonic_s())
        try:
            self._in_flight = None if batch is None else self._start(batch)
        except Exception:  # the process ends; what was computed goes out before
            self._emit_effects([*effects, *self._take_result(before)])
            raise
        if before is not None:
            self._emit_effects(effects)
            effects = self._take_result(before)
        if self._in_flight is None and ahead.unsettled:
            self._emit_effects(effects)
            effects = []
            self._turn.steps.step_started_at = monotonic_s()  # a wait that does not end shows as such a step
            ahead.settle_filled()
            self._turn.steps.step_started_at = None
        return batch, effects

    def _start(self, batch: Batch) -> StartedStep:
        if self._hooks.start is None:
            raise Broken("an overlap scheduler needs a runner that starts steps")
        self._count_recomputed(batch)
        started_at = self._turn.steps.step_started_at = monotonic_s()
        return StartedStep(batch, self._hooks.start(batch), started_at)

    def _take_result(self, started: StartedStep | None) -> list[DecodeEffect]:
        """Waits for a step and commits it; nothing for None."""
        if started is None:
            return []
        asked_at = monotonic_s()
        output = started.step.result()
        now, since = monotonic_s(), max(started.started_at, self._result_at)
        self._result_at = now
        self._turn.steps.observe_overlapped(started.batch, now - since, now - asked_at)
        effects = self._scheduler.commit(started.batch, output, now)  # may wait for digests, as a part of the step
        if self._in_flight is started:
            self._in_flight = self._turn.steps.step_started_at = None
        return effects

    def close(self) -> None:
        """Ends the loop after the current turn. Thread-safe."""
        self._turn.close()

    def load(self) -> WorkerLoad:
        """Load after the last turn, with the age of the current step. Thread-safe."""
        return self._turn.load()

    def budgets(self) -> WorkerBudgets:
        """Budgets in force. Thread-safe."""
        return self._budgets

    def activity(self) -> Activity:
        """Totals for the status line. Thread-safe."""
        return self._turn.activity()

    @property
    def num_requests(self) -> int:
        """Imports, rows and exports; 0 when the process may exit."""
        return self._turn.num_requests

    def _handle(self, command: DecodeCommand) -> list[DecodeEffect]:
        match command:
            case Reserve():
                return self._reserve(command)
            case Claim(reservation_id, request, source, deadline_s, received_at):
                deadline = monotonic_s() + deadline_s
                return self._import_policy.claim(reservation_id, request, source, deadline, received_at)
            case PublishedChunk():
                return self._import_policy.on_chunk(command, monotonic_s())
            case SealArrived(id, seal):
                return self._import_policy.on_seal(id, seal, monotonic_s())
            case SourceLost(id, error):
                return self._import_policy.on_source_lost(id, error)
            case SourceReplaced(source):
                return self._import_policy.on_source_replaced(source)
            case LeasesRenewed(ids, lease_ends_at):
                self._import_policy.on_leases_renewed(ids, lease_ends_at)
                return []
            case PullEvent():
                metrics.INTEGRITY_FAILURES_TOTAL.labels("page_digest").inc(len(command.corrupt))
                return self._import_policy.on_pull_event(command, monotonic_s())
            case CommitReplied(id, valid):
                effects = self._import_policy.on_commit_reply(id, valid, monotonic_s())
                metrics.COMMIT_TOTAL.labels("invalid").inc(sum(isinstance(effect, Fail) for effect in effects))
                return effects
            case VerdictArrived(id, verdict, message):
                return self._import_policy.on_verdict(id, verdict, message)
            case QuarantineArrived(source, keys):
                return self._import_policy.on_keys_quarantined(source, keys)
            case Abort(id, reason):
                return self._import_policy.fail(id, Cancelled(reason))
            case OpenExport() | RenewLeases() | CommitExport() | ReleaseExport():
                return [] if self._exports is None else self._exports.handle(command, monotonic_s())
            case ChangeBudgets() | AllocateProbePages() | FreeProbePages():
                self._answer(command)
                return []

    def _next_wakeup(self, now: float) -> float | None:
        exports_at = None if self._exports is None else self._exports.next_deadline()
        times = [self._import_policy.next_wakeup(now), exports_at, self._join_gate.next_wakeup()]
        return self._hooks.scrub.next_wakeup(min((time for time in times if time is not None), default=None), now)

    def _scrub(self, now: float) -> list[DecodeEffect]:
        """Checks a slice of all pages if one is due, and reports what was wrong in this turn."""
        busy = bool(len(self._imports) or self._scheduler.num_rows)
        effects = self._import_policy.on_wrong_pages(self._hooks.scrub.run(now, busy=busy), now)
        self._hooks.scrub.report(self._import_policy.quarantine, now)
        return effects

    def _answer(self, command: ChangeBudgets | AllocateProbePages | FreeProbePages) -> None:
        if isinstance(command, ChangeBudgets):
            self._import_policy.change_budgets(command.budgets)
            self._budgets = command.budgets
            return command.reply.send(command.budgets)
        if isinstance(command, FreeProbePages):
            return self._turn.cache.pool.drop(command.pages, Hold.DRAINING)
        room = command.num_pages <= self._imports.num_reservable_pages
        command.reply.send(self._turn.cache.allocate(command.num_pages, Hold.DRAINING) if room else None)

    def _reserve(self, command: Reserve) -> list[DecodeEffect]:
        try:
            answer, effects = self._import_policy.reserve(
                command.id, command.num_tokens, command.keys, monotonic_s(), command.deadline_s, command.max_new_tokens,
                command.computes_prompt,
            )  # fmt: skip
        except BatonError as error:
            command.reply.send(error)
            return []
        command.reply.send(answer)
        return effects

    def _run(self, batch: Batch, effects: list[DecodeEffect]) -> tuple[StepOutput, list[DecodeEffect]]:
        """Runs a step; returns its output and the effects that were not emitted meanwhile.

        Reads begin with the step, so that the rows of their imports join the next one, not the one after that.
        """
        if self._hooks.start is None:
            left = self._submit_pulls(effects)
            with self._turn.steps.forward(batch):
                return self._runner.run(batch), [*left]
        with self._turn.steps.forward(batch):
            try:
                step = self._hooks.start(batch)
            finally:
                self._emit_effects(effects)
            return step.result(), []

    def _emit_effects(self, effects: Sequence[DecodeEffect]) -> None:
        outward = self._submit_pulls(effects)
        num_tokens = 0
        for effect in outward:
            if type(effect) is EmitTokens:
                num_tokens += len(effect.tokens)
            else:
                self._count(effect)
        if num_tokens:
            self._generated.inc(num_tokens)
        if outward:
            self._hooks.emit(outward)

    def _submit_pulls(self, effects: Sequence[DecodeEffect]) -> list[OutwardEffect]:
        """Starts the reads among `effects`; returns the other effects."""
        outward: list[OutwardEffect] = []
        for effect in effects:
            if isinstance(effect, Pull):
                self._hooks.submit(effect)
            else:
                outward.append(effect)
        return outward

    def _finish_turn(self, effects: Sequence[DecodeEffect], *, stepped: bool, idle: bool) -> None:
        load = self._snapshot_load()
        num_exports = 0 if self._exports is None else len(self._exports)
        num_requests = load.waiting_requests + load.running_rows + num_exports + (self._in_flight is not None)
        if self._ahead is None and self._hooks.start is not None and stepped and self._scheduler.num_running:
            self._deferred = self._submit_pulls(effects)  # emitted beside the next turn's step
        else:
            self._turn.publish(load, num_requests)
            self._emit_effects(effects)
        self._turn.end(load, num_requests, stepped=stepped, idle=idle)

    def _count(self, effect: OutwardEffect) -> None:
        match effect:
            case Scored(_, scores):
                metrics.PROMPT_SCORES_TOTAL.labels("decode").inc(len(scores))
            case ReportImported():
                metrics.COMMIT_TOTAL.labels(effect.times.proof).inc()
                self._count_prompt(effect.num_prompt_tokens, effect.num_cached_tokens)
            case _:
                pass

    def _count_recomputed(self, batch: Batch) -> None:
        if num_tokens := self._scheduler.num_recomputed_tokens(batch):
            metrics.TOKENS_RECOMPUTED_TOTAL.inc(num_tokens)

    def _count_decisions(self) -> None:
        """Updates the metrics of preemptions, drafts and local prompts from the scheduler's totals.

        Touches only what has changed: after a step over all weights every call finds its data out of the CPU's caches.
        """
        scheduler = self._scheduler
        if scheduler.num_preemptions != self._num_preemptions:
            self._preemptions.inc(scheduler.num_preemptions - self._num_preemptions)
            self._num_preemptions = scheduler.num_preemptions
        for reason, num in scheduler.num_send_backs.items():
            if num_new := num - self._num_send_backs[reason]:
                self._num_send_backs[reason] = num
                self._send_backs[reason].inc(num_new)
                if reason is SendBackReason.DAMAGED_COPY:
                    self._damaged_copies.inc(num_new)
        if num_given := scheduler.sent_back.num_given - self._num_given:
            metrics.SEND_BACKS_GIVEN_TOTAL.inc(num_given)
            self._num_given = scheduler.sent_back.num_given
        if self._ahead is not None:
            metrics.OVERLAP_DROPPED_TOKENS_TOTAL.inc(self._ahead.num_dropped_tokens - self._num_dropped_tokens)
            self._num_dropped_tokens = self._ahead.num_dropped_tokens
        if scheduler.num_local_prompt_tokens != self._num_local_prompt_tokens:
            self._count_prompt(
                scheduler.num_local_prompt_tokens - self._num_local_prompt_tokens,
                scheduler.num_local_cached_tokens - self._num_local_cached_tokens,
            )
            self._num_local_prompt_tokens = scheduler.num_local_prompt_tokens
            self._num_local_cached_tokens = scheduler.num_local_cached_tokens
        if self._hooks.meter is not None:
            self._hooks.meter.publish()

    def _count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self._turn.count_prompt(num_tokens, num_cached)
        metrics.PROMPT_TOKENS_TOTAL.labels("decode").inc(num_tokens)
        metrics.CACHED_TOKENS_TOTAL.labels("decode", "device").inc(num_cached)

    def _snapshot_load(self) -> WorkerLoad:
        return WorkerLoad(
            waiting_requests=len(self._imports),
            waiting_tokens=self._scheduler.num_local_tokens,
            running_rows=self._scheduler.num_rows,
            available_pages=max(0, self._imports.num_reservable_pages),
            total_pages=self._turn.cache.pool.num_pages,
        )


def _joined(effect: DecodeEffect) -> DecodeEffect:
    """Stamps the report of an import whose row has just joined the batch."""
    if not isinstance(effect, ReportImported) or effect.times.join_us:
        return effect
    return replace(effect, times=replace(effect.times, join_us=to_us(monotonic_s() - effect.received_at)))
