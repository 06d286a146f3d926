"""Bounds the rows of a decode worker by an objective on the time between tokens. Called by routers; pure.

A step computes a token of every row, so its time is the time between tokens (TPOT). The worker's own step-time fit
predicts it from the number of rows and their contexts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace

from baton.domain.timing.prompt_cost import usable_fit
from baton.domain.timing.step_time import StepShape
from baton.domain.worker import WorkerRecord


def within_tpot(record: WorkerRecord, max_tpot_s: float) -> WorkerRecord:
    """`record` with at most as many rows as one step computes in `max_tpot_s` seconds, but one if it has any.

    Contexts are the mean of the running rows. Without a usable fit all rows stay.
    """
    most, load, fit = record.budgets.rows, record.load, usable_fit(record)
    if most <= 1 or fit is None or math.isinf(max_tpot_s):
        return record
    context = load.pages.live * record.page_size / load.running_rows if load.running_rows else 0.0
    if fit.weights[-1] < 0.0:
        context = 0.0  # noise of a fit: longer contexts make no step faster
    num_rows = bisect_left(
        range(1, most + 1),
        True,
        key=lambda rows: fit.seconds_of_rows(StepShape(rows, 0.0, round(rows * context))) > max_tpot_s,
    )
    return record if num_rows == most else replace(record, budgets=replace(record.budgets, rows=max(1, num_rows)))
