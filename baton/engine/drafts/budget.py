"""How many drafts each row of a step gets: those that raise the tokens a second. Pure.

Goodput rule (SmartSpec, arXiv:2406.14066): a step that takes T seconds and gives E tokens gains by one more draft if
the chance that the draft is accepted exceeds dT / T * E. T is what the worker's step-time model predicts. Drafts are
taken in the order of that chance, so rows get different lengths, and none where the machine is busy with other rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.domain.timing.step_time import StepShape, StepTimeModel

MIN_COST = 0.03
"""Least cost of a draft as a share of a step. The model cannot tell less from noise, and host work counts."""
MIN_FIRST_CHANCE = 0.08
"""Least chance of a row's first draft, which costs more than those behind it: the row is no single token any more."""
NUM_KEPT_STEPS = 8
"""Times that an answer of `worth_asking` is given before it is found anew."""
MAX_PAUSED_STEPS = 7
"""Most steps between two questions to the drafter while nothing that it proposes pays."""
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
        self._num_left = 0  # times that it is still given
        self._is_worth = False
        self._pause = 0  # steps that the last pause had
        self._num_paused = 0  # steps of it that are left

    def worth_asking(self, shape: StepShape, num_rows: int, best_chance: Callable[[], float] = lambda: 1.0) -> bool:
        """False if no draft pays in a step of `shape` that gives so many tokens: none has more than `best_chance()`.

        Nor if nothing paid of what was proposed last: then 1 step is left out, 3 the next time, at last 7. Proposals
        cost time, too. Another number of rows ends a pause, and so does a new one.
        """
        if num_rows != self._asked_for:
            self._asked_for, self._num_left, self._pause, self._num_paused = num_rows, 0, 0, 0
        if self._num_paused:
            self._num_paused -= 1
            return False
        if self._num_left == 0:
            self._num_left = NUM_KEPT_STEPS
            self._is_worth = self._pays(shape, num_rows, best_chance)
        self._num_left -= 1
        return self._is_worth

    def add_row(self) -> None:
        """Ends a pause: a row is new, which no proposal was made for yet."""
        self._num_paused = 0

    def _pays(self, shape: StepShape, num_rows: int, best_chance: Callable[[], float]) -> bool:
        model = self._step_time
        if not model.reliable:
            return num_rows <= MAX_UNKNOWN_ROWS
        longer = StepShape(shape.num_tokens + 1, shape.chunk_pairs, shape.row_contexts)
        return self._needed(model.predict(shape), model.predict(longer), num_rows) < best_chance()

    def lengths(self, candidates: Sequence[DraftOption], shape: StepShape) -> list[int]:
        """Drafts of each candidate. `shape`: the step without drafts, in which each candidate is one token."""
        if self._step_time.reliable:
            lengths = self._best(candidates, shape)
        else:
            few = len(candidates) <= MAX_UNKNOWN_ROWS
            lengths = [min(MAX_UNKNOWN_TOKENS, one.num_tokens) if few else 0 for one in candidates]
        self._pause = 0 if any(lengths) else min(MAX_PAUSED_STEPS, 2 * self._pause + 1)
        self._num_paused = self._pause
        return lengths

    def _best(self, candidates: Sequence[DraftOption], shape: StepShape) -> list[int]:
        lengths = [0] * len(candidates)
        queue = [(-one.next_chance(1.0, 0), index) for index, one in enumerate(candidates) if one.num_tokens]
        heapq.heapify(queue)
        num_expected, seconds = float(len(candidates)), self._step_time.predict(shape)
        while queue:
            chance, index = -queue[0][0], queue[0][1]
            one = candidates[index]
            if not lengths[index] and chance < MIN_FIRST_CHANCE:
                heapq.heappop(queue)
                continue
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
