"""Bounds the rows of a decode worker by an objective on the time between tokens. Called by routers; pure.

A step computes a token of every row, so its time is the time between tokens (TPOT). The worker's own step-time fit
predicts it from the number of rows and their contexts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from baton.domain.timing.prompt_cost import usable_fit
from baton.domain.timing.step_time import StepShape, StepTimeFit
from baton.domain.worker import WorkerRecord


@dataclass(frozen=True, slots=True)
class RowObjective:
    """Time that a step may take, and its rows: `num_rows` with contexts of `context_tokens` tokens together."""

    fit: StepTimeFit
    max_tpot_s: float
    num_rows: int
    context_tokens: float

    def allows(self, num_new: int, context_tokens: float) -> bool:
        """True if a step with `num_new` rows more, of `context_tokens` tokens each, takes no longer. One may always."""
        num_rows, most = self.num_rows + num_new, self.max_tpot_s
        contexts = self.context_tokens + num_new * context_tokens
        return num_rows <= 1 or self.fit.seconds_of_rows(StepShape(num_rows, 0.0, round(contexts))) <= most


def _row_objective(record: WorkerRecord, max_tpot_s: float) -> RowObjective | None:
    """The objective with the rows that `record` announces. None without a usable fit."""
    fit, load = usable_fit(record), record.load
    if fit is None:
        return None
    context_tokens = load.pages.live * record.page_size if load.running_rows else 0
    if fit.weights[-1] < 0.0:
        fit = replace(fit, weights=(*fit.weights[:-1], 0.0))  # noise of a fit: longer contexts make no step faster
    return RowObjective(fit, max_tpot_s, load.running_rows, context_tokens)


def within_tpot(record: WorkerRecord, max_tpot_s: float, context_tokens: float = 0.0) -> WorkerRecord:
    """`record` with at most as many rows as one step computes in `max_tpot_s` seconds, but one if it has any.

    Running rows have the mean of their contexts, rows that may come `context_tokens`; 0: that mean. Without a usable
    fit all rows stay.
    """
    if max_tpot_s == math.inf:
        return record
    most, objective = record.budgets.rows, _row_objective(record, max_tpot_s)
    if most <= 1 or objective is None:
        return record
    running = objective.num_rows
    mean = objective.context_tokens / running if running else context_tokens
    if num_over := _first_over(replace(objective, num_rows=0, context_tokens=0.0), min(running, most), mean):
        num_rows = num_over - 1
    else:
        num_over = _first_over(objective, most - running, context_tokens or mean)
        num_rows = running + num_over - 1 if num_over else most
    return record if num_rows == most else replace(record, budgets=replace(record.budgets, rows=max(1, num_rows)))


def _first_over(objective: RowObjective, most: int, context_tokens: float) -> int:
    """The least number of rows, up to `most`, that the objective does not allow; 0 if it allows `most`."""
    index = bisect_left(range(1, most + 1), True, key=lambda number: not objective.allows(number, context_tokens))
    return index + 1 if index < most else 0
