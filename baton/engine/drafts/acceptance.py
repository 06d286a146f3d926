"""Estimates how likely the next draft of a row is accepted, given that those before it were. Pure.

Counts of accepted and rejected drafts by grade of the proposal and by row, with forgetting. A row's own counts are
blended with its grade's, and these with a prior: a grade or row without news returns to it and is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.ids import AttemptId
from baton.engine.drafts.base import ROOT, Proposal, sibling_ranks

PRIOR, PRIOR_WEIGHT = 0.7, 2.0
"""Acceptance of a grade before anything was seen, and the drafts that it counts as."""
SIBLING_PRIOR = 0.1
"""Acceptance of a node behind the first child of its parent, given that the parent was, before anything was seen."""
SIBLING_GRADES = 1000
"""Distance of the grades of a tree's first, second, ... children: each rank has counts of its own."""
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

    def highest(self) -> float:
        """The most that `estimate` gives for any row and grade."""
        of_grades = [PRIOR, *(self._blended(counts, PRIOR, PRIOR_WEIGHT) for counts in self._grades.values())]
        best = max(of_grades)
        return max([best, *(self._blended(counts, best, GRADE_WEIGHT) for counts in self._rows.values())])

    def observe(self, id: AttemptId, grade: int, num_drafts: int, num_accepted: int) -> None:
        """A step accepted the first `num_accepted` of `num_drafts`; those behind the rejected one tell nothing."""
        num_rejected = int(num_accepted < num_drafts)
        self._grades.setdefault(grade, _Totals()).add(num_accepted, num_rejected, self._step)
        self._rows.setdefault(id, _Totals()).add(num_accepted, num_rejected, self._step)

    def chances(self, id: AttemptId, proposal: Proposal) -> list[float]:
        """For each node of a tree, the probability that it and its whole path are accepted."""
        by_rank: dict[int, float] = {0: self.estimate(id, proposal.grade)}
        chances: list[float] = []
        for parent, rank in zip(proposal.parents, sibling_ranks(proposal.parents), strict=True):
            if rank not in by_rank:
                counts = self._grades.get(proposal.grade + rank * SIBLING_GRADES)
                later = self._blended(counts, SIBLING_PRIOR, PRIOR_WEIGHT)
                by_rank[rank] = min(later, by_rank.get(rank - 1, 1.0))  # so siblings keep their order
            chances.append(by_rank[rank] * (1.0 if parent == ROOT else chances[parent]))
        return chances

    def observe_tree(self, id: AttemptId, proposal: Proposal, path: Sequence[int]) -> None:
        """A step accepted the nodes of `path`, one after another, and nothing behind them.

        Every child of a node that was reached is known to be right or wrong.
        """
        ranks, rights = sibling_ranks(proposal.parents), [*path, None]
        of_row = self._rows.setdefault(id, _Totals())
        for reached, right in zip([ROOT, *path], rights, strict=True):
            for child in (node for node, parent in enumerate(proposal.parents) if parent == reached):
                counts = int(child == right), int(child != right), self._step
                self._grades.setdefault(proposal.grade + ranks[child] * SIBLING_GRADES, _Totals()).add(*counts)
                if ranks[child] == 0:
                    of_row.add(*counts)

    def end(self, id: AttemptId) -> None:
        """Forgets a row."""
        self._rows.pop(id, None)

    def _blended(self, counts: _Totals | None, prior: float, weight: float) -> float:
        if counts is None:
            return prior
        counts.forget(self._step)
        return counts.blended(prior, weight)
