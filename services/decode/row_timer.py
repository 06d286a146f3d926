"""Where the time of a row went: in steps, waiting for the next step, or preempted. Pure; kept by the scheduler's rows.

Every running row takes part in every step, so a row reads the scheduler's totals when it joins and when it leaves:
nothing is done per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.attempt_times import DecodeTimes, to_us


@dataclass(slots=True)
class StepTotals:
    """All steps of one scheduler so far."""

    num_steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RowTimer:
    """Times of one row. `enter` and `leave` alternate; a row that left was preempted until it enters again."""

    totals: StepTotals
    num_preemptions: int = 0
    _num_steps: int = 0
    _step_s: float = 0.0
    _active_s: float = 0.0
    _preempted_s: float = 0.0
    _since: float | None = None  # the last `enter` or `leave`

    def enter(self, now: float) -> None:
        """The row joins the batch."""
        if self._since is not None:
            self._preempted_s += now - self._since
        self._since = now
        self._num_steps -= self.totals.num_steps
        self._step_s -= self.totals.seconds

    def leave(self, now: float) -> None:
        """The row leaves the batch: it ended or was preempted."""
        assert self._since is not None
        self._active_s += now - self._since
        self._since = now
        self._num_steps += self.totals.num_steps
        self._step_s += self.totals.seconds

    def preempt(self, now: float) -> None:
        """The row leaves the batch to come back."""
        self.num_preemptions += 1
        self.leave(now)

    def times(self) -> DecodeTimes:
        """After `leave`."""
        return DecodeTimes(
            steps=self._num_steps,
            step_us=to_us(self._step_s),
            waited_us=to_us(self._active_s - self._step_s),
            preempted_us=to_us(self._preempted_s),
            num_preemptions=self.num_preemptions,
        )
