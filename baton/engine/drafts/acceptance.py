"""Estimates how likely the next draft of a row is accepted, given that those before it were. Pure.

Counts of accepted and rejected drafts by grade of the proposal and by row, with forgetting. A row's own counts are
blended with its grade's, and these with a prior: a grade or row without news returns to it and is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import AttemptId

PRIOR, PRIOR_WEIGHT = 0.7, 2.0
"""Acceptance of a grade before anything was seen, and the drafts that it counts as."""
GRADE_WEIGHT = 4.0
"""Drafts that the grade counts as, in the estimate of a row."""
FORGETTING_PER_STEP = 0.995
FORGETTING_PER_DRAFT = 0.95


@dataclass(slots=True)
class _Totals:
    accepted: float = 0.0
    rejected: float = 0.0
    step: int = 0  # of the last forgetting

    def forget(self, step: int) -> None:
        factor = FORGETTING_PER_STEP ** (step - self.step)
        self.accepted *= factor
        self.rejected *= factor
        self.step = step

    def add(self, num_accepted: int, num_rejected: int, step: int) -> None:
        self.forget(step)
        factor = FORGETTING_PER_DRAFT ** (num_accepted + num_rejected)
        self.accepted = self.accepted * factor + num_accepted
        self.rejected = self.rejected * factor + num_rejected

    def blended(self, prior: float, weight: float) -> float:
        return (self.accepted + prior * weight) / (self.accepted + self.rejected + weight)


class AcceptanceModel:
    """Acceptance by grade and row, learned from verified steps."""

    def __init__(self) -> None:
        self._grades: dict[int, _Totals] = {}
        self._rows: dict[AttemptId, _Totals] = {}
        self._step = 0

    def begin_step(self) -> None:
        """One step has passed for all counts."""
        self._step += 1

    def estimate(self, id: AttemptId, grade: int) -> float:
        """Probability that one more draft of the row is accepted."""
        of_grade = self._blended(self._grades.get(grade), PRIOR, PRIOR_WEIGHT)
        return self._blended(self._rows.get(id), of_grade, GRADE_WEIGHT)

    def observe(self, id: AttemptId, grade: int, num_drafts: int, num_accepted: int) -> None:
        """A step accepted the first `num_accepted` of `num_drafts`; those behind the rejected one tell nothing."""
        num_rejected = int(num_accepted < num_drafts)
        self._grades.setdefault(grade, _Totals()).add(num_accepted, num_rejected, self._step)
        self._rows.setdefault(id, _Totals()).add(num_accepted, num_rejected, self._step)

    def end(self, id: AttemptId) -> None:
        """Forgets a row."""
        self._rows.pop(id, None)

    def _blended(self, counts: _Totals | None, prior: float, weight: float) -> float:
        if counts is None:
            return prior
        counts.forget(self._step)
        return counts.blended(prior, weight)
