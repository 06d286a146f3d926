"""How many drafts each row of a step gets: those that raise the tokens a second. Pure.

Goodput rule (SmartSpec, arXiv:2406.14066): a step that takes T seconds and gives E tokens gains by one more draft if
the chance that the draft is accepted exceeds dT / T * E. T is what the worker's step-time model predicts. Drafts are
taken in the order of that chance, so rows get different lengths, and none where the machine is busy with other rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.timing.step_time import StepShape, StepTimeModel

MIN_COST = 0.03
"""Least cost of a draft as a share of a step. The model cannot tell less from noise, and host work counts."""
NUM_KEPT_STEPS = 8
"""Steps for which the answer to `worth_asking` is kept."""
MAX_UNKNOWN_ROWS, MAX_UNKNOWN_TOKENS = 4, 2
"""While the duration of steps is not known: rows of a step with drafts, and drafts of each."""


@dataclass(frozen=True, slots=True)
class DraftOption:
    """A row's proposal: it has `start` tokens in place, `num_tokens` drafts, each accepted with chance `acceptance`.

    `chances`: of a tree, that each node and its whole path are accepted, in falling order; () for a chain.
    """

    start: int
    num_tokens: int
    acceptance: float
    chances: tuple[float, ...] = ()

    def next_chance(self, chance: float, num_taken: int) -> float:
        """The chance of the draft behind `num_taken`, of which the last one had `chance`."""
        return self.chances[num_taken] if self.chances else chance * self.acceptance


class DraftBudget:
    """The rule over one engine's step-time model."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._asked_for = 0  # rows of the kept answer
        self._num_left = 0  # steps for which it is kept
        self._is_worth = False

    def worth_asking(self, shape: StepShape, num_rows: int) -> bool:
        """False if not even a draft that is certainly accepted pays in a step of `shape` that gives so many tokens."""
        self._num_left -= 1
        if self._num_left < 0 or num_rows != self._asked_for:
            self._asked_for, self._num_left = num_rows, NUM_KEPT_STEPS - 1
            self._is_worth = self._pays(shape, num_rows)
        return self._is_worth

    def _pays(self, shape: StepShape, num_rows: int) -> bool:
        model = self._step_time
        if not model.reliable:
            return num_rows <= MAX_UNKNOWN_ROWS
        longer = StepShape(shape.num_tokens + 1, shape.chunk_pairs, shape.row_contexts)
        return self._needed(model.predict(shape), model.predict(longer), num_rows) < 1.0

    def lengths(self, candidates: Sequence[DraftOption], shape: StepShape) -> list[int]:
        """Drafts of each candidate. `shape`: the step without drafts, in which each candidate is one token."""
        lengths = [0] * len(candidates)
        if not self._step_time.reliable:
            few = len(candidates) <= MAX_UNKNOWN_ROWS
            return [min(MAX_UNKNOWN_TOKENS, one.num_tokens) if few else 0 for one in candidates]
        queue = [(-one.next_chance(1.0, 0), index) for index, one in enumerate(candidates) if one.num_tokens]
        heapq.heapify(queue)
        num_expected, seconds = float(len(candidates)), self._step_time.predict(shape)
        while queue:
            chance, index = -queue[0][0], queue[0][1]
            one = candidates[index]
            longer = _with_one_more(shape, one.start, lengths[index])
            longer_s = self._step_time.predict(longer)
            if chance <= self._needed(seconds, longer_s, num_expected):
                break
            lengths[index] += 1
            shape, seconds, num_expected = longer, longer_s, num_expected + chance
            if lengths[index] < one.num_tokens:
                heapq.heapreplace(queue, (-one.next_chance(chance, lengths[index]), index))
            else:
                heapq.heappop(queue)
        return lengths

    @staticmethod
    def _needed(seconds: float, longer_s: float, num_expected: float) -> float:
        """Chance above which a draft that makes a step longer raises its tokens a second."""
        cost = (longer_s - seconds) / seconds if seconds > 0 else 0.0
        return max(MIN_COST, cost) * num_expected


def _with_one_more(shape: StepShape, start: int, num_drafts: int) -> StepShape:
    """`shape` after a row with `num_drafts` drafts gets one more; the model counts it as a chunk, not as a row."""
    before, after = 1 + num_drafts, 2 + num_drafts
    pairs = after * (start + after / 2) - (before * (start + before / 2) if num_drafts else 0.0)
    contexts = shape.row_contexts - (0 if num_drafts else start + 1)
    return StepShape(shape.num_tokens + 1, shape.chunk_pairs + pairs, contexts)
