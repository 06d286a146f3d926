"""The prefill engine's loop: take commands, schedule, run, commit, perform effects. Runs in the engine thread.

Owns the scheduler, the exports and the page pool. Every other thread sends commands through the mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.domain.errors import BatonError
from baton.domain.ids import PageId
from baton.domain.worker import WorkerLoad, WorkerRole
from baton.engine.batch import Runner
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Abort, Fail
from baton.engine.step_metrics import StepMetrics, monotonic_s
from baton.kv.prefix_cache import PrefixCache
from baton.telemetry import metrics
from services.prefill.commands import (
    AddPrompt,
    CommitExport,
    ExportEnded,
    PrefillCommand,
    PrefillEvent,
    PublishedChunk,
    ReleaseExport,
    RenewLeases,
)
from services.prefill.kv_export import ExportTable
from services.prefill.scheduler import PrefillEffect, PrefillScheduler, PublishChunk, Seal

IDLE_CHECK_S = 0.5
"""Quiet time after which the books are checked, once."""

DigestPages = Callable[[Sequence[PageId]], tuple[int, ...]]


class PrefillLoop:
    """One engine. `emit` receives each turn's events; it is called from the engine thread and must not block."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: PrefillScheduler,
        exports: ExportTable,
        runner: Runner,
        digest: DigestPages | None,
        emit: Callable[[list[PrefillEvent]], None],
        on_idle: Callable[[], None],
        mailbox: Mailbox[PrefillCommand],
    ) -> None:
        self._mailbox = mailbox
        self._cache = cache
        self._scheduler = scheduler
        self._exports = exports
        self._runner = runner
        self._digest = digest
        self._emit = emit
        self._on_idle = on_idle
        self._step_metrics = StepMetrics(WorkerRole.PREFILL, cache.pool)
        self._busy = False
        self._pool_checked = False
        self._load = self._snapshot_load()

    def turn(self) -> bool:
        """One pass; waits for commands when there is nothing to compute. False when the mailbox has closed."""
        commands = self._mailbox.take_all(self._wait_s())
        if self._mailbox.closed:
            return False
        events = [event for command in commands for event in self._handle(command)]
        events += self._perform(self._scheduler.expire(monotonic_s()))
        batch = self._scheduler.schedule(monotonic_s())
        self._busy = batch is not None
        if batch is not None:
            with self._step_metrics.step():
                output = self._step_metrics.run(self._runner, batch)
                events += self._perform(self._scheduler.commit(batch, output, monotonic_s()))
        self._finish_turn(events, idle=not commands and batch is None)
        return True

    def close(self) -> None:
        """Ends the loop after the current turn; may be called from any thread."""
        self._mailbox.close()

    def load(self) -> WorkerLoad:
        """The last turn's snapshot with the current step's age; may be called from any thread."""
        return replace(self._load, step_age_s=self._step_metrics.step_age_s())

    @property
    def num_requests(self) -> int:
        """Open exports, which every request here has; 0 means that nothing is lost by exiting."""
        return len(self._exports)

    def _wait_s(self) -> float | None:
        if self._busy:
            return 0.0
        wakeup = self._scheduler.next_wakeup()
        waits = [] if wakeup is None else [max(0.0, wakeup - monotonic_s())]
        return min(waits if self._pool_checked else [*waits, IDLE_CHECK_S], default=None)

    def _handle(self, command: PrefillCommand) -> list[PrefillEvent]:
        match command:
            case AddPrompt(request, decode_prefix_len, deadline_s):
                metrics.PROMPT_TOKENS_TOTAL.labels("prefill").inc(len(request.tokens))
                try:
                    return self._perform(self._scheduler.add(request, decode_prefix_len, monotonic_s() + deadline_s))
                except BatonError as error:
                    metrics.STALE_MESSAGES_TOTAL.labels("prefill").inc()
                    return [Fail(request.id, error)]
            case Abort(id, reason):
                return [ExportEnded(id, reason)] if self._scheduler.abort(id) else []
            case ReleaseExport(id, reason):
                return [ExportEnded(id, reason)] if self._scheduler.release(id) else []
            case RenewLeases(ids, reply):
                reply.send(self._exports.renew(ids, monotonic_s()))
                return []
            case CommitExport(id, commit_reply):
                valid = self._exports.commit(id)
                commit_reply.send(valid)
                return [ExportEnded(id, "committed")] if valid else []

    def _perform(self, effects: Sequence[PrefillEffect]) -> list[PrefillEvent]:
        return [self._to_event(effect) for effect in effects]

    def _to_event(self, effect: PrefillEffect) -> PrefillEvent:
        match effect:
            case PublishChunk(id, first_page, pages):
                return PublishedChunk(id, first_page, pages, self._digest(pages) if self._digest else None)
            case Seal():
                metrics.CACHED_TOKENS_TOTAL.labels("prefill", "device").inc(effect.num_cached_tokens)
                metrics.GENERATED_TOKENS_TOTAL.labels("prefill").inc()
                return effect
            case _:
                return effect

    def _finish_turn(self, events: list[PrefillEvent], idle: bool) -> None:
        if idle and not self._pool_checked:
            self._cache.pool.check()
            self._cache.check()
        self._pool_checked = idle
        self._load = self._snapshot_load()
        self._step_metrics.update_gauges(self._scheduler.num_waiting)
        if events:
            self._emit(events)
        if self.num_requests == 0:
            self._on_idle()

    def _snapshot_load(self) -> WorkerLoad:
        return WorkerLoad(
            waiting_requests=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.num_remaining_tokens,
            running_rows=self._scheduler.num_chunking,
            available_pages=self._cache.num_available,
            total_pages=self._cache.pool.num_pages,
        )
