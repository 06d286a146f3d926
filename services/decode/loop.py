"""The decode engine's loop: take commands, schedule, run, commit, perform effects. Runs in the engine thread.

Owns arrivals, landings, scheduler and the page pool; whoever wants something of them puts a command into the mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.domain.errors import BatonError, Cancelled
from baton.domain.worker import WorkerLoad, WorkerRole
from baton.engine.batch import Batch, Runner, StepInFlight, StepOutput
from baton.engine.mailbox import Mailbox
from baton.engine.observe import Clock, StepObserver
from baton.kv.pages import Hold
from baton.kv.radix import RadixCache
from baton.telemetry import metrics
from baton.transfer.base import Pull, PullOutcome
from services.decode.arrivals import Arrivals
from services.decode.commands import (
    Abort,
    AskPromise,
    ChunkArrived,
    Claim,
    CommitAnswered,
    DecodeCommand,
    GivePages,
    LeasesRenewed,
    Pulled,
    SealArrived,
    SourceLost,
    SourceReplaced,
    TakePages,
)
from services.decode.effects import (
    DecodeEffect,
    EmitTokens,
    Fail,
    OutwardEffect,
    Preempted,
    ReportLanded,
    StartPull,
    TakenIn,
)
from services.decode.landing import LandingBook
from services.decode.scheduler import DecodeScheduler

IDLE_CHECK_S = 0.5
"""Quiet time after which the books are checked, once."""


class DecodeLoop:
    """One engine. `emit` receives each turn's effects for the outside, `submit` starts reads; neither may block.

    `start`, of a runner that returns before a step is done, lets a turn's effects go out while the next step runs.
    """

    def __init__(
        self,
        cache: RadixCache,
        landings: LandingBook,
        scheduler: DecodeScheduler,
        arrivals: Arrivals,
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
        self._landings = landings
        self._scheduler = scheduler
        self._arrivals = arrivals
        self._runner = runner
        self._max_rows = max_rows
        self._emit = emit
        self._submit = submit
        self._on_idle = on_idle
        self._start = start
        self._held: list[OutwardEffect] = []
        self._observer = StepObserver(WorkerRole.DECODE, cache.pool)
        self._busy = False
        self._checked = False
        self._load = self._measure()

    def turn(self) -> bool:
        """One pass; waits for commands when no row can step. False when the mailbox has closed."""
        commands = self._mailbox.take(self._patience_s())
        if self._mailbox.closed:
            self._publish(self._held)
            return False
        effects: list[DecodeEffect] = [*self._held, *(e for command in commands for e in self._obey(command))]
        self._held = []
        effects += self._arrivals.expire(Clock())
        batch = self._scheduler.schedule(Clock())
        self._busy = batch is not None
        if batch is not None:
            metrics.TOKENS_RECOMPUTED_TOTAL.inc(self._scheduler.num_recomputed_tokens(batch))
            with self._observer.step():
                output, effects = self._run(batch, effects)
                effects += self._scheduler.commit(batch, output, Clock())
        effects += self._scheduler.take_pending()
        self._finish_turn(effects, idle=not commands and batch is None)
        return True

    def close(self) -> None:
        """Ends the loop after the current turn; may be called from any thread."""
        self._mailbox.close()

    def load(self) -> WorkerLoad:
        """The last turn's snapshot with the current step's age; may be called from any thread."""
        return replace(self._load, step_age_s=self._observer.step_age_s())

    @property
    def num_requests(self) -> int:
        """Landings and rows; 0 means that nothing is lost by exiting."""
        return self._load.waiting_requests + self._load.running_rows

    def _patience_s(self) -> float | None:
        if self._busy:
            return 0.0
        wakeup = self._arrivals.next_wakeup()
        waits = [] if wakeup is None else [max(0.0, wakeup - Clock())]
        return min(waits if self._checked else [*waits, IDLE_CHECK_S], default=None)

    def _obey(self, command: DecodeCommand) -> list[DecodeEffect]:
        match command:
            case AskPromise():
                return self._promise(command)
            case Claim(promise_id, request, source, deadline_s):
                return self._arrivals.claim(promise_id, request, source, Clock() + deadline_s)
            case ChunkArrived(id, first_page, pages, digests):
                return self._arrivals.chunk(id, first_page, pages, digests, Clock())
            case SealArrived(id, seal):
                return self._arrivals.sealed(id, seal, Clock())
            case SourceLost(id, error):
                return self._arrivals.source_lost(id, error)
            case SourceReplaced(source):
                return self._arrivals.source_replaced(source)
            case LeasesRenewed(ids, lease_ends_at):
                self._arrivals.renewed(ids, lease_ends_at)
                return []
            case Pulled(event):
                if event.outcome is PullOutcome.CORRUPT:
                    metrics.INTEGRITY_FAILURES_TOTAL.labels("page_digest").inc(len(event.corrupt))
                return self._arrivals.pulled(event, Clock())
            case CommitAnswered(id, valid):
                effects = self._arrivals.commit_answer(id, valid, Clock())
                if any(isinstance(effect, Fail) for effect in effects):
                    metrics.COMMIT_TOTAL.labels("invalid").inc()
                return effects
            case Abort(id, reason):
                return self._arrivals.fail(id, Cancelled(reason))
            case TakePages(num_pages, reply):
                room = num_pages <= self._landings.num_promisable
                reply.send(self._cache.allocate(num_pages, Hold.DRAINING) if room else None)
                return []
            case GivePages(pages):
                self._cache.pool.drop(pages, Hold.DRAINING)
                return []

    def _promise(self, ask: AskPromise) -> list[DecodeEffect]:
        try:
            answer, effects = self._arrivals.promise(ask.id, ask.num_tokens, ask.keys, Clock(), ask.deadline_s)
        except BatonError as error:
            ask.reply.send(error)
            return []
        ask.reply.send(answer)
        return effects

    def _run(self, batch: Batch, effects: list[DecodeEffect]) -> tuple[StepOutput, list[DecodeEffect]]:
        """The step's output, and those of `effects` that did not go out while it ran."""
        with self._observer.forward(batch):
            if self._start is None:
                return self._runner.run(batch), effects
            try:
                step = self._start(batch)
            finally:
                self._publish(effects)
            return step.result(), []

    def _publish(self, effects: Sequence[DecodeEffect]) -> None:
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
        if idle and not self._checked:
            self._cache.pool.check()
            self._cache.check()
        self._checked = idle
        self._load = self._measure()
        self._observer.pages(len(self._landings))
        if self._start is not None and self._busy and self._scheduler.num_running:
            self._held = self._submit_pulls(effects)  # the next turn, at once, has a step to run beside
        else:
            self._publish(effects)
        if self.num_requests == 0:
            self._on_idle()

    def _count(self, effect: OutwardEffect) -> None:
        match effect:
            case EmitTokens(_, tokens):
                metrics.GENERATED_TOKENS_TOTAL.labels("decode").inc(len(tokens))
            case ReportLanded():
                metrics.COMMIT_TOTAL.labels(effect.proof.value).inc()
                metrics.PROMPT_TOKENS_TOTAL.labels("decode").inc(effect.num_prompt_tokens)
                metrics.CACHED_TOKENS_TOTAL.labels("decode", "device").inc(effect.num_cached_tokens)
            case TakenIn():
                metrics.PROMPT_TOKENS_TOTAL.labels("decode").inc(effect.num_prompt_tokens)
                metrics.CACHED_TOKENS_TOTAL.labels("decode", "device").inc(effect.num_cached_tokens)
            case Preempted():
                metrics.PREEMPTIONS_TOTAL.labels("pages").inc()
            case _:
                pass

    def _measure(self) -> WorkerLoad:
        return WorkerLoad(
            waiting_requests=len(self._landings),
            waiting_tokens=self._scheduler.num_local_tokens,
            running_rows=self._scheduler.num_rows,
            max_rows=self._max_rows,
            available_pages=max(0, self._landings.num_promisable),
            total_pages=self._cache.pool.num_pages,
        )
