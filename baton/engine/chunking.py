"""Cuts prompts into chunks: how large those of a step are together, and where a chunk ends. Pure.

Only the tail of a prompt may be partial; a non-final chunk ends on a page edge.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.domain.ids import AttemptId
from baton.domain.timing.step_time import EMPTY_STEP, StepShape, StepTimeModel

ITL_SHARE = 0.8
"""Share of the objective that a predicted step may take; the rest is for what the prediction misses."""


class ChunkPolicy(enum.StrEnum):
    """What bounds the chunks of a step.

    FIXED: the token budget. EQUAL: also the time of the first chunk of a prompt, so that steps do not grow with the
    context. ITL: also an objective for the time between the tokens of the rows in the same step.
    """

    FIXED = "fixed"
    EQUAL = "equal"
    ITL = "itl"


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """Sizes the chunks of one engine's steps by what `step_time` predicts.

    While the prediction is not reliable, and for chunks of at most a page, only `token_budget` counts: a prompt always
    advances. `itl_objective_s`: for ITL.
    """

    token_budget: int
    page_size: int
    chunking: ChunkPolicy = ChunkPolicy.FIXED
    step_time: StepTimeModel | None = None
    itl_objective_s: float = 0.0

    def tokens(self, beside: StepShape, start: int) -> int:
        """Most tokens of all chunks in a step with the rows of `beside`; the first chunk begins at position `start`."""
        budget = max(self.page_size, self.token_budget - beside.num_tokens)
        model = self.step_time
        if self.chunking is ChunkPolicy.FIXED or model is None or not model.reliable:
            return budget
        objective_s = ITL_SHARE * self.itl_objective_s
        if self.chunking is ChunkPolicy.EQUAL:
            objective_s = model.predict(EMPTY_STEP.with_chunk(self.token_budget, 0))
        return max(self.page_size, model.largest_chunk(objective_s, beside, start, budget))


class StepBudget:
    """The tokens of one step, given to prompts one after another, and again. Lives for one step."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.left = num_tokens
        self._page_size = page_size
        self._given: dict[AttemptId, int] = {}

    def given(self, id: AttemptId) -> int:
        """Tokens that the prompt has got."""
        return self._given.get(id, 0)

    def take_back(self, id: AttemptId) -> None:
        """Takes back what a prompt has got that is not in this step after all."""
        self.left += self._given.pop(id, 0)

    def give(self, id: AttemptId, start: int, end: int, most: int) -> None:
        """Gives the prompt up to `most` further tokens of [start, end), as many as are left and end on a page edge."""
        before = self.given(id)
        total = cut(start, end, before + min(most, self.left), self._page_size)
        if total > before:
            self._given[id] = total
            self.left -= total - before


def cut(start: int, end: int, budget_tokens: int, page_size: int) -> int:
    """Number of tokens of [start, end) to extend in this step, at most `budget_tokens`.

    All that remain if they fit. Otherwise as many as end on a page edge: 0 if the budget does not reach one.
    """
    left = end - start
    if left <= budget_tokens:
        return left
    edge = (start + budget_tokens) // page_size * page_size
    return max(0, edge - start)
