"""Time of a row in steps, between steps and while preempted. Kept by the rows of decode's scheduler.

Every running row takes part in every step. So a row reads the scheduler's totals when it joins and when it leaves, and
nothing is done per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.timing.attempt_times import DecodeTimes, to_us


@dataclass(slots=True)
class StepTotals:
    """Totals over all steps of one scheduler."""

    num_steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RowTimer:
    """Times of one row. `enter` and `leave` alternate; the time between leaving and entering counts as preempted."""

    totals: StepTotals
    num_preemptions: int = 0
    _num_steps: int = 0
    _step_s: float = 0.0
    _active_s: float = 0.0
    _preempted_s: float = 0.0
    _since: float | None = None  # the last `enter` or `leave`

    def enter(self, now: float) -> None:
        """Starts an interval in the batch."""
        if self._since is not None:
            self._preempted_s += now - self._since
        self._since = now
        self._num_steps -= self.totals.num_steps
        self._step_s -= self.totals.seconds

    def leave(self, now: float) -> None:
        """Ends an interval in the batch."""
        assert self._since is not None
        self._active_s += now - self._since
        self._since = now
        self._num_steps += self.totals.num_steps
        self._step_s += self.totals.seconds

    def preempt(self, now: float) -> None:
        """Ends an interval by a preemption."""
        self.num_preemptions += 1
        self.leave(now)

    def times(self) -> DecodeTimes:
        """Times up to the last `leave`."""
        return DecodeTimes(
            steps=self._num_steps,
            step_us=to_us(self._step_s),
            waited_us=to_us(self._active_s - self._step_s),
            preempted_us=to_us(self._preempted_s),
            num_preemptions=self.num_preemptions,
        )
