"""Steps, waiting and preemption add up to a row's time."""

from __future__ import annotations

from baton.domain.timing.attempt_times import DecodeTimes
from baton.domain.timing.row_timer import RowTimer, StepTotals


def test_steps_waiting_and_preemption_add_up_to_the_whole_time():
    totals = StepTotals(num_steps=7, seconds=3.0)  # steps before the row joined
    timer = RowTimer(totals)
    timer.enter(10.0)
    totals.num_steps, totals.seconds = 9, 3.5
    timer.preempt(11.0)
    totals.num_steps, totals.seconds = 20, 8.0  # steps of others
    timer.enter(14.0)
    totals.num_steps, totals.seconds = 21, 8.25
    timer.leave(14.5)
    times = timer.times()
    assert times == DecodeTimes(steps=3, step_us=750_000, waited_us=750_000, preempted_us=3_000_000, num_preemptions=1)
    assert times.step_us + times.waited_us + times.preempted_us == 4_500_000
