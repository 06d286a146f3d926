"""Cuts prompts into chunks: how large those of a step are together, and where a chunk ends. Pure.

Only the tail of a prompt may be partial; a non-final chunk ends on a page edge. Where a model's images may not be cut,
it ends before or behind one, off the edge if need be: later steps fill the page.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.ids import AttemptId
from baton.domain.timing.step_time import EMPTY_STEP, Segment, StepShape, StepTimeModel

Blocks = Sequence[tuple[int, int]]
"""Places [start, end) that a chunk may not cut, in order."""

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
            objective_s = model.predict(_first_chunk(self.token_budget))
        return max(self.page_size, model.largest_chunk(objective_s, beside, start, budget))


class StepBudget:
    """The tokens of one step, given to prompts one after another, and again. Lives for one step.

    With a step-time model whose prediction is reliable, steps take equal time as the context grows: the step takes no
    longer than `num_tokens` tokens at the beginning of a prompt, and a prompt's part of it no longer than the tokens
    that it was offered would there. The first prompt gets a page in any case, so every step advances one. Once a step,
    a prompt gets more than is left: all of an image that may not be cut.
    """

    def __init__(self, num_tokens: int, page_size: int, step_time: StepTimeModel | None = None) -> None:
        """`step_time` None: only tokens count."""
        self.left = num_tokens
        self._page_size = page_size
        self._given: dict[AttemptId, Segment] = {}
        self._step_time = step_time if step_time is not None and step_time.reliable else None
        self._has_overshot = False
        self._longest_s = 0.0 if self._step_time is None else self._step_time.predict(_first_chunk(num_tokens))

    def given(self, id: AttemptId) -> int:
        """Tokens that the prompt has got."""
        return self._given.get(id, _NOTHING)[0]

    def take_back(self, id: AttemptId) -> None:
        """Takes back what a prompt has got that is not in this step after all."""
        self.left += self._given.pop(id, _NOTHING)[0]

    def give(self, id: AttemptId, start: int, end: int, most: int, blocks: Blocks = ()) -> None:
        """Gives the prompt up to `most` further tokens of [start, end), as many as are left and end on a page edge.

        Where a prompt is at one of `blocks` that does not fit, it gets all of it: the first prompt always, one of the
        others while a page is left.
        """
        before = self.given(id)
        total = cut(start, end, self.room(id, start, end, most), self._page_size, blocks)
        if not total and (not self._given or (self.left >= self._page_size and not self._has_overshot)):
            total = next((last - start for first, last in blocks if first <= start < last), 0)
            self._has_overshot |= total > self.left
        if total > before:
            self._given[id] = total, start
            self.left -= total - before

    def room(self, id: AttemptId, start: int, end: int, most: int) -> int:
        """Tokens of [start, end) that the prompt could have in this step: those it got, and up to `most` more.

        Less than it got where even these take too long by now.
        """
        offered = self.given(id) + max(0, min(most, self.left))
        tokens, model = min(offered, end - start), self._step_time
        if model is None or tokens <= 0:
            return tokens
        others = StepShape.of(given for one, given in self._given.items() if one != id)
        if start > 0:
            tokens = model.largest_chunk(model.predict(_first_chunk(offered)), EMPTY_STEP, start, tokens)
        fitting = model.largest_chunk(self._longest_s, others, start, tokens)
        return fitting if others.num_tokens else max(fitting, min(offered, end - start, self._page_size))


_NOTHING: Segment = (0, 0)


def _first_chunk(num_tokens: int) -> StepShape:
    """A step with the first tokens of a prompt."""
    return EMPTY_STEP.with_chunk(num_tokens, 0)


def cut(start: int, end: int, budget_tokens: int, page_size: int, blocks: Blocks = ()) -> int:
    """Number of tokens of [start, end) to extend in this step, at most `budget_tokens`.

    All that remain if they fit. Otherwise as many as end on a page edge outside `blocks`; if the budget reaches none,
    as many as end before or behind a block; else 0.
    """
    left = end - start
    if left <= budget_tokens:
        return left
    edge = (start + budget_tokens) // page_size * page_size
    for first, last in reversed(blocks):
        if first < edge < last:
            edge = first // page_size * page_size
    if edge > start or not blocks:
        return max(0, edge - start)
    borders = [place for block in blocks for place in block if start < place <= start + budget_tokens]
    free = [place for place in borders if not any(first < place < last for first, last in blocks)]
    return max(free, default=start) - start
