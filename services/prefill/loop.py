"""The prefill engine's loop: take commands, schedule, run, commit, perform effects. Runs in the engine thread.

Owns the scheduler, the exports and the page pool. Every other thread sends commands through the mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton.domain.errors import BatonError, Overloaded
from baton.domain.worker import Activity, WorkerBudgets, WorkerLoad
from baton.engine.batch import Batch, Runner
from baton.engine.handoff.export_commands import CommitExport, OpenExport, ReleaseExport, RenewalAnswer, RenewLeases
from baton.engine.handoff.export_events import ExportEnded, Seal
from baton.engine.handoff.import_commands import (
    AllocateProbePages,
    CommitReplied,
    ExportAnswer,
    FreeProbePages,
    LeasesRenewed,
    PageImportCommand,
    QuarantineArrived,
    SourceReplaced,
    VerdictArrived,
)
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.media.encoder import MediaEncoder
from baton.engine.media.store import HeldMedia, MediaKey
from baton.engine.messages import Abort, Fail, Scored
from baton.engine.page_scrub import PageScrub
from baton.engine.reply import Reply
from baton.engine.step_metrics import monotonic_s
from baton.engine.turn import EngineTurn
from baton.kv.pages import Hold
from baton.services.prefill.commands import AddPrompt, EndPromptCall, PrefillCommand, PrefillEvent, TierEnded
from baton.services.prefill.overlap.steps import StepQueue
from baton.services.prefill.policy import BurstGate
from baton.services.prefill.scheduler import PrefillEffect, PrefillScheduler
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.transfer.base import PullEvent
from baton.worker.budget_control import ChangeBudgets
from baton.worker.media.media_receiver import FindMedia, HoldMedia, RoomQuery

log = get_logger()

NO_BUDGET_RETRY_S = 1.0
"""Pause after a refusal without a budget. The announcement shows the budget by then."""


class PrefillLoop:
    """The loop of one prefill engine. `emit` takes the events of a turn, in the engine thread; it must not block."""

    def __init__(
        self,
        turn: EngineTurn[PrefillCommand],
        scheduler: PrefillScheduler,
        exports: ExportTable,
        runner: Runner,
        scrub: PageScrub,
        emit: Callable[[list[PrefillEvent]], None],
    ) -> None:
        self._turn = turn
        self._scheduler = scheduler
        self._exports = exports
        self._runner = runner
        self._scrub = scrub
        self._emit = emit
        self._budgets = WorkerBudgets(scheduler.limits.token_budget)
        self.encoder: MediaEncoder | None = None
        self.ahead: StepQueue | None = None  # set where steps start before the result of the one before is taken
        self.burst: BurstGate | None = None  # set where the worker borrows cores
        turn.publish(self._snapshot_load(), 0)

    def turn(self) -> bool:
        """Runs one turn; waits for commands when there is nothing to compute. False once the mailbox is closed."""
        commands = self._turn.take_commands(self._next_wakeup())
        if self._turn.mailbox.closed:
            self._emit(self._perform(self._end_steps()))
            return False
        events = [event for command in commands for event in self._handle(command)]
        events += self._perform(self._scheduler.expire(monotonic_s()))
        if self.ahead is not None and self._has_images():
            events = self._emit_before(events, self._end_steps)  # images are no part of the times of steps
        encoded = self._encode()
        holds = self.burst is not None and self.burst.holds(monotonic_s())
        batch, lost = self._check_images(None if holds else self._scheduler.schedule(monotonic_s()))
        events += self._perform([*self._scheduler.take_pending_effects(), *lost])
        if effects := self._scheduler.imports.take_effects():
            self._emit([*effects])  # they go on beside the step
        has_step = batch is not None
        if self.ahead is not None:
            has_step |= len(self.ahead) > 0
            events = self._step_ahead(self.ahead, batch, events)
        elif batch is not None:
            with self._turn.steps.step():
                output = self._turn.steps.run(self._runner, batch)
                events += self._perform(self._scheduler.commit(batch, output, monotonic_s()))
        now = monotonic_s()
        wrong = self._scrub.run(now, busy=has_step or holds)
        events += self._perform(self._scheduler.on_wrong_pages(wrong, now))
        self._scrub.report(self._scheduler.quarantine, now)
        load = self._snapshot_load()
        self._turn.publish(load, len(self._exports))
        if events:
            self._emit(events)
        stepped = has_step or encoded or bool(lost) or self._scheduler.media.num_wanted > 0
        self._turn.end(load, len(self._exports), stepped=stepped, idle=not commands and not stepped)
        return True

    def _step_ahead(self, ahead: StepQueue, batch: Batch | None, events: list[PrefillEvent]) -> list[PrefillEvent]:
        """Starts a step, then commits the one before. Returns the events that are left to emit.

        One step is left running, unless no other one follows it.
        """
        num_before, num_running = len(ahead), ahead.num_running
        if batch is not None:
            ahead.start(batch)
        if num_before > num_running:
            events = self._emit_before(events, ahead.settle)
        return self._emit_before(events, ahead.take) if num_running else events

    def _emit_before(self, events: list[PrefillEvent], wait: Callable[[], list[PrefillEffect]]) -> list[PrefillEvent]:
        """Emits what is known before it waits for more, which it returns."""
        if events:
            self._emit(events)
        return self._perform(wait())

    def _end_steps(self) -> list[PrefillEffect]:
        """Commits what was started."""
        effects: list[PrefillEffect] = []
        while self.ahead is not None and len(self.ahead):
            effects += [*self.ahead.settle(), *self.ahead.take()]
        return effects

    def _next_wakeup(self) -> float | None:
        wakeup = self._scrub.next_wakeup(self._scheduler.next_wakeup(), monotonic_s())
        held_until = None if self.burst is None else self.burst.next_wakeup()
        return min((time for time in (wakeup, held_until) if time is not None), default=None)

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
        """Open exports, one per request here; 0 when the process may exit."""
        return len(self._exports)

    def _has_images(self) -> bool:
        return self.encoder is not None and self._scheduler.media.num_wanted > 0

    def _encode(self) -> bool:
        """A step of images, if prompts wait for any. False without one."""
        media = self._scheduler.media
        if self.encoder is None or not media.num_wanted:
            return False
        batch = media.next_batch()
        if batch:
            with self._turn.steps.encode(sum(item.num_rows for _, item in batch)):
                failed = self.encoder.encode(batch)
            media.on_encoded(self._turn.steps.last_encode_s)
            for key, error in failed:
                media.on_failed(key, error)
        return bool(batch)

    def _check_images(self, batch: Batch | None) -> tuple[Batch | None, list[PrefillEffect]]:
        """The step without the prompts whose embeddings have changed in memory, or are lost, and their ends."""
        if batch is None:
            return None, []
        media = self._scheduler.media
        num_damaged, faults = media.num_damaged, media.check(batch.rows)
        if num_new := media.num_damaged - num_damaged:
            metrics.INTEGRITY_FAILURES_TOTAL.labels("embedding").inc(num_new)
            log.error("embeddings_wrong", images=num_new, total=media.num_damaged)
            self._report_held()
        if not faults:
            return batch, []
        for id, _ in faults:
            self._scheduler.abort(id)
        ended = {id for id, _ in faults}
        rows = tuple(row for row in batch.rows if row.id not in ended)
        return Batch(rows) if rows else None, [Fail(id, fault) for id, fault in faults]

    def _hold(self, key: MediaKey, item: HeldMedia[Any, Any], reply: Reply[bool]) -> None:
        store = self._scheduler.media.store
        num_evicted, now = store.num_evicted, monotonic_s()
        is_held = store.hold(key, item, now)
        store.keep(key, now)
        reply.send(is_held)
        metrics.MEDIA_EVICTED_TOTAL.inc(store.num_evicted - num_evicted)
        self._report_held()

    def _report_held(self) -> None:
        store = self._scheduler.media.store
        metrics.MEDIA_HELD.set(len(store))
        metrics.MEDIA_HELD_BYTES.set(store.num_bytes)

    def _handle(self, command: PrefillCommand) -> list[PrefillEvent]:
        match command:
            case AddPrompt():
                return self._add(command)
            case ChangeBudgets(budgets, reply):
                if budgets.takes_prompts:
                    self._scheduler.change_token_budget(budgets.prefill_tokens)
                self._budgets = budgets
                reply.send(budgets)
                return []
            case EndPromptCall(added, reason):
                return [] if added.call.refused else self._handle(Abort(added.request.id, reason))
            case Abort(id, reason):
                return [ExportEnded(id, reason)] if self._scheduler.abort(id) else []
            case ReleaseExport():
                return self._release(command)
            case RenewLeases(ids, reply, seen):
                ended = self._exports.renew(ids, monotonic_s())
                reply.send(RenewalAnswer(tuple(ended), *self._scheduler.quarantine.since(seen)))
                return []
            case CommitExport(id, commit_reply):
                valid = self._exports.commit(id)
                commit_reply.send(valid)
                return [ExportEnded(id, "committed")] if valid else []
            case OpenExport():
                return self._open(command)
            case TierEnded():
                return []  # the turn's schedule takes what has ended
            case FindMedia(key, found):
                store = self._scheduler.media.store
                item = store.find(key)
                store.keep(key, monotonic_s())
                found.send(None if item is None else (item.num_rows, item.grid))
                return []
            case HoldMedia(key, item, held):
                self._hold(key, item, held)
                return []
            case RoomQuery(num_bytes, has_room):
                has_room.send(self._scheduler.media.store.has_room(num_bytes, monotonic_s()))
                return []
            case _:
                return self._import(command)

    def _import(self, command: PageImportCommand | PullEvent) -> list[PrefillEvent]:
        imports, now = self._scheduler.imports, monotonic_s()
        match command:
            case ExportAnswer(id, answer):
                imports.on_opened(id, answer, now)
            case PullEvent():
                metrics.INTEGRITY_FAILURES_TOTAL.labels("page_digest").inc(len(command.corrupt))
                imports.on_pull_event(command, now)
            case SourceReplaced(source):
                imports.on_source_replaced(source, now)
            case QuarantineArrived(_, keys):
                return self._perform(self._scheduler.on_keys_quarantined(keys))
            case AllocateProbePages(num_pages, reply):
                reply.send(self._turn.cache.allocate(num_pages, Hold.DRAINING))
            case FreeProbePages(pages):
                self._turn.cache.pool.drop(pages, Hold.DRAINING)
            case LeasesRenewed() | CommitReplied() | VerdictArrived():
                pass  # digests prove the pages, and the verdict was logged
        return []

    def _open(self, command: OpenExport) -> list[PrefillEvent]:
        """Opens an export of cached pages, unless this worker computes the same request or gives none."""
        id, keys, first, reply = command.id, command.keys, command.first_page, command.reply
        cached, now = self._scheduler.cached_exports, monotonic_s()
        if cached is None or self._exports.has_open(id.request_id):
            reply.send(Overloaded(f"{id}: no cached pages are given", retry_after_s=1.0))
            return []
        events = self._perform(self._scheduler.on_wrong_pages(cached.find_wrong(keys), now))
        try:
            reply.send(cached.open(id, keys, first, now))
        except BatonError as error:
            reply.send(error)
        return events

    def _add(self, command: AddPrompt) -> list[PrefillEvent]:
        request = command.request
        if not self._budgets.takes_prompts and not self._exports.is_open(request.id):
            command.call.refused = True
            refusal = Overloaded(
                "this prefill worker takes no prompts: its budget is 0", retry_after_s=NO_BUDGET_RETRY_S
            )
            return [Fail(request.id, refusal)]
        metrics.PROMPT_TOKENS_TOTAL.labels("prefill").inc(len(request.tokens))
        try:
            now, is_idle = monotonic_s(), not (self._scheduler.num_waiting or self._scheduler.num_chunking)
            deadline, prefix_len = now + command.deadline_s, command.decode_prefix_len
            effects = self._scheduler.add(request, prefix_len, deadline, command.received_at, command.source, now)
            if self.burst is not None:
                num_tokens, budget = self._scheduler.num_remaining_tokens, self._scheduler.limits.token_budget
                self.burst.on_added(command.num_coming, num_tokens, budget, now, is_idle=is_idle)
        except BatonError as error:
            metrics.STALE_MESSAGES_TOTAL.labels("prefill").inc()
            command.call.refused = True
            return [Fail(request.id, error)]
        return self._perform(effects)

    def _release(self, command: ReleaseExport) -> list[PrefillEvent]:
        verdict, effects = self._scheduler.examine(command.id, command.suspects, monotonic_s())
        if command.reply is not None:
            command.reply.send(verdict)
        events = self._perform(effects)
        return [*events, ExportEnded(command.id, command.reason)] if self._scheduler.release(command.id) else events

    def _perform(self, effects: Sequence[PrefillEffect]) -> list[PrefillEvent]:
        return [self._to_event(effect) for effect in effects]

    def _to_event(self, effect: PrefillEffect) -> PrefillEvent:
        match effect:
            case Seal():
                times = effect.times
                self._turn.count_prompt(times.computed_tokens + times.cached_tokens, times.cached_tokens)
                num_here = times.cached_tokens - sum(effect.num_from_tiers.values()) - times.imported_tokens
                metrics.CACHED_TOKENS_TOTAL.labels("prefill", "device").inc(num_here)
                metrics.CACHED_TOKENS_TOTAL.labels("prefill", "peer").inc(times.imported_tokens)
                for role, num_tokens in effect.num_imported.items():
                    metrics.IMPORTED_TOKENS_TOTAL.labels(role.value).inc(num_tokens)
                for tier, num_tokens in effect.num_from_tiers.items():
                    metrics.CACHED_TOKENS_TOTAL.labels("prefill", tier).inc(num_tokens)
                metrics.GENERATED_TOKENS_TOTAL.labels("prefill").inc()
                return effect
            case Scored(_, scores):
                metrics.PROMPT_SCORES_TOTAL.labels("prefill").inc(len(scores))
                return effect
            case _:
                return effect

    def _snapshot_load(self) -> WorkerLoad:
        """Images that wait count as the prompt tokens that take as long."""
        num_rows = self._scheduler.media.num_wanted_rows if self.encoder is not None else 0
        return WorkerLoad(
            waiting_requests=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.num_remaining_tokens + self._turn.steps.tokens_to_encode(num_rows),
            running_rows=self._scheduler.num_chunking,
            available_pages=self._turn.cache.num_available,
            total_pages=self._turn.cache.pool.num_pages,
            media=self._scheduler.media.store.counts,
        )
