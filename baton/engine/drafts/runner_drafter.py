"""A drafter whose drafts the runner makes, at the start of the step that verifies them.

It says how many it wants; the model behind it keeps its state in the rows' pages, so there is nothing to begin or end.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.ids import AttemptId
from baton.engine.drafts.base import DRAFT_PLACEHOLDER, Proposal

MAX_RUNNER_DRAFTS = 7
"""Most drafts of a row and step. They are made one after another, and fewer and fewer of them are accepted."""


def max_chain(num_head_layers: int) -> int:
    """Most drafts of a row and step for a head of so many layers, 0 for none: of several, each makes one."""
    return MAX_RUNNER_DRAFTS if num_head_layers < 2 else min(MAX_RUNNER_DRAFTS, num_head_layers)


class RunnerDrafter:
    """A `Drafter` without tokens of its own."""

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """See `Drafter.begin`."""

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """See `Drafter.propose`: placeholders for as many drafts as are wanted."""
        return Proposal((DRAFT_PLACEHOLDER,) * min(max_tokens, MAX_RUNNER_DRAFTS))

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """See `Drafter.accepted`."""

    def end(self, id: AttemptId) -> None:
        """See `Drafter.end`."""
