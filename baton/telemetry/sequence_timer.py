"""Stamps one choice of a request: its stages, attempts and tokens. Made by `RequestTimer.begin`.

The dispatcher stamps stages and attempts, the stream its tokens. A token costs three stores and one ITL bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from baton.domain.timing.attempt_times import DecodeTimes, ImportTimes, PrefillTimes
from baton.domain.worker import WorkerRecord
from baton.telemetry import metrics
from baton.telemetry.fast.fast_histogram import FastHistogramChild, observe_each
from baton.telemetry.request_trace import MAX_ATTEMPTS, AttemptTrace, SequenceTrace, Stage, StageTime

if TYPE_CHECKING:
    from baton.telemetry.request_timer import RequestTimer

_BEFORE_TOKEN = (Stage.ADMIT, Stage.RETRY, Stage.RESERVE, Stage.DISPATCH, Stage.PREFILL)
_DISPATCH, _PREFILL, _EMIT = Stage.DISPATCH, Stage.PREFILL, Stage.EMIT  # reading a member takes as long as a call
_TRANSFER_TAIL, _JOIN, _DECODE, _FINISH = Stage.TRANSFER_TAIL, Stage.JOIN, Stage.DECODE, Stage.FINISH
_OF_ATTEMPT = (Stage.RESERVE, Stage.DISPATCH, Stage.PREFILL)
_IN_PROGRESS = (Stage.READ, Stage.PARSE, Stage.ADMIT, Stage.RESERVE, Stage.DISPATCH, Stage.PREFILL, Stage.EMIT)

_of_stage: dict[Stage, FastHistogramChild] = {}  # a series is shown from its first observation on
_ttft, _e2e = cache(metrics.TTFT_SECONDS.labels), cache(metrics.E2E_SECONDS.labels)  # by path; a metric keeps its
_itl, _first_itl = cache(metrics.ITL_SECONDS.labels), cache(metrics.FIRST_ITL_SECONDS.labels)  # children, too


@dataclass(slots=True)
class _Attempt:
    """An attempt so far. Times are seconds on the timer's clock."""

    number: int
    start_s: float
    prefill: WorkerRecord | None = None
    decode: WorkerRecord | None = None
    reserved_s: float | None = None
    dispatched_s: float | None = None
    early_s: float = 0.0
    encode_s: float = 0.0
    sealed_s: float | None = None
    end_s: float | None = None
    busy_replies: int = 0
    end_code: str = ""
    end_phase: str = ""
    prefill_times: PrefillTimes | None = None
    import_times: ImportTimes | None = None
    decode_times: DecodeTimes | None = None


class SequenceTimer:
    """Stamps of one choice. Made by `RequestTimer.begin`."""

    def __init__(self, request: RequestTimer, index: int) -> None:
        self.request = request
        self.num_tokens = 0
        self.finish_reason = ""
        self.first_s: float | None = None
        self._index = index
        self._stamps: dict[Stage, float] = {}
        self._last_s = 0.0
        self._max_gap_s = 0.0
        self._max_gap_at = 0
        self._finished_s: float | None = None
        self._imported_s: float | None = None
        self._attempts: list[_Attempt] = []
        self._num_attempts = 0
        self._attempt: _Attempt | None = None
        self._first_attempt: _Attempt | None = None  # the one that made the first token
        self._attempt_start_s = request.clock()
        self._itl: FastHistogramChild | None = None

    @property
    def path(self) -> str:
        """`split` when a prefill worker accepted the prompt, else `local`."""
        return "split" if Stage.DISPATCH in self._stamps else "local"

    def stamp(self, stage: Stage) -> None:
        """ADMIT, RESERVE, DISPATCH or PREFILL is over. The first stamp counts; after the first token, none does."""
        if self.first_s is None:
            now = self.request.clock()
            self._stamps.setdefault(stage, now)
            if stage is Stage.ADMIT:
                self._attempt_start_s = now

    def dispatched(self, early_s: float, encode_s: float = 0.0) -> None:
        """Prefill has had the prompt for `early_s` seconds, 0 unless it began before the reservation. Ends DISPATCH.

        `encode_s`: the seconds before that for which its images were on their way over encode workers.
        """
        if self.first_s is None:
            self.stamp(Stage.DISPATCH)
            if self._attempt is not None:
                self._attempt.dispatched_s = self.request.clock() - early_s
                self._attempt.early_s, self._attempt.encode_s = early_s, encode_s

    def attempt(self, number: int, prefill: WorkerRecord, decode: WorkerRecord, busy_replies: int = 0) -> None:
        """Attempt `number` has a reservation; ends RESERVE. With a local prefill both workers are the same one."""
        self.stamp(Stage.RESERVE)
        now = self.request.clock()
        self._attempt = _Attempt(number, self._attempt_start_s, prefill, decode, now, busy_replies=busy_replies)
        self._add(self._attempt)

    def sealed(self, times: PrefillTimes | None) -> None:
        """Prefill has sealed the prompt's pages; ends PREFILL."""
        self.stamp(Stage.PREFILL)
        if self._attempt is not None:
            self._attempt.sealed_s = self.request.clock()
            self._attempt.prefill_times = times
            if self._num_attempts > 1 and self.first_s is not None:
                self._report_replay(self._attempt)

    def imported(self, times: ImportTimes | None) -> None:
        """Decode has committed the import."""
        if self.num_tokens <= 1:  # a later import belongs to a replay, which is part of DECODE
            self._imported_s = self.request.clock()
        if self._attempt is not None:
            self._attempt.import_times = times

    def decoded(self, times: DecodeTimes | None) -> None:
        """Decode's part of the attempt is over."""
        if self._attempt is not None:
            self._attempt.decode_times = times

    def lost(self, code: str, phase: str) -> None:
        """The attempt failed. Before the first token its time becomes the stage RETRY, after it a gap in DECODE."""
        now = self.request.clock()
        attempt = self._attempt
        if attempt is None:
            attempt = _Attempt(self._attempts[-1].number + 1 if self._attempts else 1, self._attempt_start_s)
            self._add(attempt)
        attempt.end_s, attempt.end_code, attempt.end_phase = now, code, phase
        self._attempt, self._attempt_start_s = None, now
        if self.first_s is None:
            for stage in _OF_ATTEMPT:
                self._stamps.pop(stage, None)
            self._stamps[Stage.RETRY] = now
            self._imported_s = None
        worker = attempt.decode.id if attempt.decode is not None else "no worker"
        self.request.event("attempt_failed", f"attempt {attempt.number} on {worker}, {phase}: {code}")

    def token(self, now: float) -> None:
        """A token went to the client at `now`; the first one ends TTFT."""
        self.num_tokens += 1
        if self.first_s is None:
            self.first_s = self._last_s = now
            self._first_attempt = self._attempt
            self._itl = _itl(self.path)
            return
        gap_s = now - self._last_s
        self._last_s = now
        if gap_s > self._max_gap_s:
            self._max_gap_s, self._max_gap_at = gap_s, self.num_tokens
        if self._itl is not None:
            self._itl.observe(gap_s)
            if self.num_tokens == 2:
                _first_itl(self.path).observe(gap_s)

    def finish(self, reason: str) -> None:
        """The sequence ended by itself; the first call counts."""
        if not self.finish_reason:
            self.finish_reason = reason
            self._finished_s = self.request.clock()
            if self._attempt is not None:
                self._attempt.end_s = self._finished_s

    def record_latencies(self, exemplar: dict[str, str] | None, known: tuple[StageTime, ...] = ()) -> None:
        """Adds a finished sequence to the latency metrics, TTFT and E2E with `exemplar`. `RequestTimer.end` calls it
        once. `known`: its stages up to a later time, the end of the request; only the last one of them is longer."""
        path, end_s = self.path, self._finished_s
        assert end_s is not None
        end_us = self.request.us(end_s)
        unix_s = 1e-6 * (self.request.arrived_unix_us + end_us)
        observations: list[tuple[FastHistogramChild, float]] = []
        for each in known or self.stages(end_s, finished=True):
            stage = each.stage
            us = end_us - each.start_us if stage is _FINISH else each.duration_us
            if stage not in _of_stage:
                _of_stage[stage] = metrics.REQUEST_STAGE_SECONDS.labels(stage.value)
            observations.append((_of_stage[stage], us / 1e6))
        observe_each(observations)
        if self.first_s is not None:
            _ttft(path).observe(self.request.us(self.first_s) / 1e6, exemplar, unix_s)
        _e2e(path).observe(end_us / 1e6, exemplar, unix_s)

    def stages(self, end_s: float, *, finished: bool) -> tuple[StageTime, ...]:
        """The partition of the time from arrival to `end_s`: gapless, none negative.

        A stage without a stamp lends its time to the next one. An unfinished sequence ends in its current stage.
        """
        us, end_us, stamps, arrived_s = self.request.us, self.request.us(end_s), self._stamps, self.request.arrived_s
        first_us = end_us if self.first_s is None else min(us(self.first_s), end_us)
        attempt = self._first_attempt or self._attempt
        parts: list[StageTime] = []
        before = 0
        own = [(stage, stamps[stage]) for stage in _BEFORE_TOKEN if stage in stamps]
        for stage, at_s in (*self.request.stamps.items(), *own):
            at_us = round(1e6 * (at_s - arrived_s))  # as `us`
            at_us = first_us if at_us > first_us else at_us if at_us > before else before
            if stage is _PREFILL or stage is _DISPATCH:
                before = _append_cut(parts, stage, before, at_us, attempt)
            else:
                parts.append(StageTime(stage, before, at_us - before))
                before = at_us
        if self.first_s is None:
            stage = _FINISH if finished else self._current_stage()
            parts.append(StageTime(stage, before, end_us - before))
            return tuple(parts)
        parts.append(StageTime(_EMIT, before, first_us - before))
        before = first_us
        for stage, at_us in self._after_token(end_us, finished):
            at_us = end_us if at_us > end_us else at_us if at_us > before else before
            parts.append(StageTime(stage, before, at_us - before))
            before = at_us
        return tuple(parts)

    def trace(self, now_s: float) -> SequenceTrace:
        """This sequence's part of the request's trace."""
        us = self.request.us
        return SequenceTrace(
            index=self._index,
            output_tokens=self.num_tokens,
            finish_reason=self.finish_reason,
            first_token_us=None if self.first_s is None else us(self.first_s),
            last_token_us=None if self.first_s is None else us(self._last_s),
            max_gap_us=round(1e6 * self._max_gap_s) if self._max_gap_at else None,
            max_gap_at_token=self._max_gap_at or None,
            num_attempts=self._num_attempts,
            attempts=tuple([self._attempt_trace(attempt, now_s) for attempt in self._attempts]),
        )

    def _report_replay(self, attempt: _Attempt) -> None:
        """An attempt continues after a token: names its workers and the pause up to its seal."""
        prefill, decode = attempt.prefill, attempt.decode
        if prefill is not None and decode is not None and attempt.sealed_s is not None:
            pause = f"{attempt.sealed_s - self._last_s:.2f} s pause"
            self.request.event("replayed", f"attempt {attempt.number} on {prefill.id} > {decode.id}, {pause}")

    def _add(self, attempt: _Attempt) -> None:
        self._num_attempts += 1
        if len(self._attempts) == MAX_ATTEMPTS:
            self._attempts.pop()
        self._attempts.append(attempt)

    def _current_stage(self) -> Stage:
        stamped = self.request.stamps.keys() | self._stamps.keys()
        last = max((index for index, stage in enumerate(_IN_PROGRESS) if stage in stamped), default=-1)
        return _IN_PROGRESS[min(last + 1, len(_IN_PROGRESS) - 1)]

    def _after_token(self, end_us: int, finished: bool) -> list[tuple[Stage, int]]:
        """The ends of the stages from the first token on."""
        us, ends = self.request.us, list[tuple[Stage, int]]()
        times = None if self._first_attempt is None else self._first_attempt.import_times
        if self._imported_s is not None:
            ends.append((_TRANSFER_TAIL, us(self._imported_s)))
            if times is not None:
                ends.append((_JOIN, us(self._imported_s) + max(0, times.join_us - times.commit_us)))
        last_us = us(self._last_s) if finished else end_us
        ends = [(stage, min(at_us, last_us)) for stage, at_us in ends]
        if self.num_tokens > 1 or not finished:
            ends.append((_DECODE, last_us))
        return [*ends, (_FINISH, end_us)] if finished else ends

    def _attempt_trace(self, attempt: _Attempt, now_s: float) -> AttemptTrace:
        us = self.request.us
        return AttemptTrace(
            attempt=attempt.number,
            start_us=us(attempt.start_s),
            end_us=us(now_s if attempt.end_s is None else attempt.end_s),
            prefill="" if attempt.prefill is None else attempt.prefill.id,
            decode="" if attempt.decode is None else attempt.decode.id,
            prefill_incarnation=0 if attempt.prefill is None else attempt.prefill.incarnation,
            decode_incarnation=0 if attempt.decode is None else attempt.decode.incarnation,
            reserve_us=None if attempt.reserved_s is None else us(attempt.reserved_s) - us(attempt.start_s),
            busy_replies=attempt.busy_replies,
            early_us=round(1e6 * attempt.early_s),
            skew_us=_skew_us(attempt),
            end_code=attempt.end_code,
            end_phase=attempt.end_phase,
            prefill_times=attempt.prefill_times,
            import_times=attempt.import_times,
            decode_times=attempt.decode_times,
        )


def _append_cut(parts: list[StageTime], stage: Stage, start_us: int, end_us: int, attempt: _Attempt | None) -> int:
    """Adds DISPATCH or PREFILL; returns its end. The worker's queue cuts PREFILL, and the time of its images the queue.

    The way of images over encode workers is the end of DISPATCH, and a stage ENCODE, too. What of all that was over
    when the reservation came is a part of RESERVE.
    """
    if stage is Stage.DISPATCH and attempt is not None and attempt.encode_s > 0.0:
        encode_us = 0 if attempt.early_s else round(1e6 * attempt.encode_s)  # early: all of it was before DISPATCH
        cut_us = max(start_us, end_us - encode_us)
        parts.append(StageTime(stage, start_us, cut_us - start_us))
        stage, start_us = Stage.ENCODE, cut_us
    times = None if attempt is None else attempt.prefill_times
    if stage is Stage.PREFILL and attempt is not None and times is not None:
        encode_us, early_us = min(max(0, times.encode_us), max(0, times.queue_us)), round(1e6 * attempt.early_s)
        for part, part_us in ((Stage.PREFILL_QUEUE, times.queue_us - encode_us), (Stage.ENCODE, encode_us)):
            cut_us = min(start_us + max(0, part_us - early_us), end_us)
            early_us = max(0, early_us - max(0, part_us))
            if part is Stage.PREFILL_QUEUE or encode_us:
                parts.append(StageTime(part, start_us, cut_us - start_us))
            start_us = cut_us
    parts.append(StageTime(stage, start_us, end_us - start_us))
    return end_us


def _skew_us(attempt: _Attempt) -> int | None:
    """The prefill interval less what the worker accounts for."""
    if attempt.prefill_times is None or attempt.dispatched_s is None or attempt.sealed_s is None:
        return None
    return round(1e6 * (attempt.sealed_s - attempt.dispatched_s)) - attempt.prefill_times.seal_us
