"""Metrics of an engine loop: steps, rows and pages. Teaches the step-time model. Called from the engine thread only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from baton.domain.timing.step_time import StepShape, StepTimeModel
from baton.domain.worker import PageCounts, WorkerRole
from baton.engine.batch import Batch, Runner, StepOutput
from baton.kv.pages import Owner, PagePool
from baton.telemetry import metrics

monotonic_s = time.monotonic

ENCODE_SMOOTHING = 0.2
"""Weight of the newest step in the time of a row of an image."""

CHUNK_TOKENS = 256
"""Tokens of the chunk whose time per token stands for that of prompts."""


class StepMetrics:
    """Times steps and keeps the page gauges. `step_started_at` may be read from other threads (one word)."""

    def __init__(self, role: WorkerRole, pool: PagePool) -> None:
        self._pool = pool
        self._counts: dict[Owner, int] = {}
        self.step_started_at: float | None = None
        self._pages = {owner: metrics.KV_PAGES.labels(owner.name.lower()) for owner in Owner}
        states = () if pool.windows is None else tuple(pool.windows.counts())
        self._window_slots = {state: metrics.WINDOW_SLOTS.labels(state) for state in states}
        self._num_evicted = 0
        self._step_s = metrics.STEP_SECONDS.labels(role.value)
        self._host_s = metrics.STEP_HOST_SECONDS.labels(role.value)
        self._tokens = metrics.STEP_TOKENS.labels(role.value)
        self._rows = metrics.BATCH_ROWS.labels(role.value)
        self._waiting = metrics.WAITING_REQUESTS.labels(role.value)
        self._num_waiting = self._num_rows = -1  # as the gauges tell; unknown before the first
        self._step = _StepTimer(self)
        self.forward_s = self.last_forward_s = 0.0
        self._encode_s_per_row = 0.0
        self._has_encoded = False
        self.last_encode_s = 0.0
        self.num_tokens = 0
        self.step_time = model = StepTimeModel()
        metrics.STEP_TIME_ERROR.labels(role.value).set_function(lambda: model.error)  # read by scrapes, not every step

    def step_age_s(self) -> float:
        """Age of the current step in seconds; 0 between steps."""
        started_at = self.step_started_at
        return 0.0 if started_at is None else monotonic_s() - started_at

    def step(self) -> _StepTimer:
        """Encloses a step that has work: from the batch's run to the last effect. Steps do not nest."""
        return self._step

    def observe_step(self, seconds: float, host_s: float) -> None:
        """Records the duration of a step and the host's part of it."""
        self._step_s.observe(seconds)
        self._host_s.observe(max(0.0, host_s))

    @contextmanager
    def encode(self, num_rows: int) -> Iterator[None]:
        """Encloses a step that makes `num_rows` rows of images: nothing of it is the host's time, or a token's."""
        started_at = self.step_started_at = monotonic_s()
        try:
            yield
        finally:
            self.step_started_at = None
            seconds = self.last_encode_s = monotonic_s() - started_at
            metrics.ENCODE_SECONDS.observe(seconds)
            if self._has_encoded:
                found, known = seconds / max(1, num_rows), self._encode_s_per_row
                self._encode_s_per_row = found if known == 0.0 else known + ENCODE_SMOOTHING * (found - known)
            self._has_encoded = True  # the first one is cold: it loads what later ones find

    def tokens_to_encode(self, num_rows: int) -> int:
        """Prompt tokens that take as long as `num_rows` rows of images, by both times as measured here.

        As many as rows until both are known.
        """
        if num_rows == 0 or self._encode_s_per_row == 0.0 or not self.step_time.reliable:
            return num_rows
        token_s = self.step_time.seconds_of(CHUNK_TOKENS, 0, CHUNK_TOKENS) / CHUNK_TOKENS
        return num_rows if token_s <= 0.0 else round(num_rows * self._encode_s_per_row / token_s)

    def forward(self, batch: Batch) -> _ForwardTimer:
        """Encloses the runner's part of a step, and the host's work beside it."""
        return _ForwardTimer(self, batch)

    def observe_forward(self, batch: Batch, seconds: float) -> None:
        """Records the runner's part of the step that is enclosed now."""
        self.forward_s = self.last_forward_s = seconds
        self._observe(batch, seconds)

    def observe_overlapped(self, batch: Batch, seconds: float, waited_s: float) -> None:
        """Records a step that ran beside the host's work for others.

        `seconds`: from its start, or the end of the step before if that was later. `waited_s`: of them, the time for
        which the host waited. The rest is the host's; it is hidden as long as the host waits at all.
        """
        self.observe_step(seconds, seconds - waited_s)
        self._observe(batch, seconds)

    def _observe(self, batch: Batch, seconds: float) -> None:
        shape = shape_of(batch)
        self.num_tokens += shape.num_tokens
        self._tokens.observe(shape.num_tokens)
        if len(batch.rows) != self._num_rows:
            self._rows.set(len(batch.rows))
            self._num_rows = len(batch.rows)
        if not batch.copies:  # their time is not that of tokens
            has_prompt = shape.chunk_pairs > 0 and batch.num_prompt_tokens > 0
            self.step_time.observe(shape, seconds, has_prompt=has_prompt)

    def run(self, runner: Runner, batch: Batch) -> StepOutput:
        """`runner.run(batch)`, timed."""
        with self.forward(batch):
            return runner.run(batch)

    def update_gauges(self, num_waiting: int) -> None:
        """Publishes changed page counts and the queue's length."""
        if num_waiting != self._num_waiting:
            self._waiting.set(num_waiting)
            self._num_waiting = num_waiting
        before, self._counts = self._counts, self._pool.counts()
        for owner, count in self._counts.items():
            if before.get(owner) != count:
                self._pages[owner].set(count)
        if (windows := self._pool.windows) is not None:
            for state, count in windows.counts().items():
                self._window_slots[state].set(count)
            metrics.WINDOW_EVICTIONS_TOTAL.inc(windows.num_evicted - self._num_evicted)
            self._num_evicted = windows.num_evicted

    def pages(self) -> PageCounts:
        """The pool at the last `update_gauges`. Any thread may call it: `_counts` is replaced, never changed."""
        return PageCounts(**{owner.name.lower(): count for owner, count in self._counts.items()})


class _StepTimer:
    """See `StepMetrics.step`. No generator, as each step has one: those cost several times as much."""

    __slots__ = ("_metrics", "_started_at")

    def __init__(self, metrics: StepMetrics) -> None:
        self._metrics = metrics
        self._started_at = 0.0

    def __enter__(self) -> None:
        self._started_at = self._metrics.step_started_at = monotonic_s()
        self._metrics.forward_s = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.step_started_at = None
        seconds = monotonic_s() - self._started_at
        self._metrics.observe_step(seconds, seconds - self._metrics.forward_s)


class _ForwardTimer:
    """See `StepMetrics.forward`. Records nothing if the runner fails."""

    __slots__ = ("_batch", "_metrics", "_started_at")

    def __init__(self, metrics: StepMetrics, batch: Batch) -> None:
        self._metrics, self._batch = metrics, batch
        self._started_at = 0.0

    def __enter__(self) -> None:
        self._started_at = monotonic_s()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._metrics.observe_forward(self._batch, monotonic_s() - self._started_at)


def shape_of(batch: Batch) -> StepShape:
    """The shape of a batch for the step-time model."""
    sizes = [len(row.tokens) if row.wanted is None else row.num_step_tokens for row in batch.rows]
    return StepShape.of(zip(sizes, [row.start for row in batch.rows], strict=True))
