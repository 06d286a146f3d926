"""The comparison of chains and trees counts the steps that an output takes, and every token of it once."""

from __future__ import annotations

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.engine.drafts.base import ROOT, Proposal
from baton.engine.drafts.ngram import NGramDrafter
from baton.engine.drafts.policy import DraftPolicy
from baton.kv.pages import PagePool
from bench.speculation.transcripts import RecordedOutput
from bench.speculation.trees import num_steps, right_path

FORKED = (1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 0)
"""Behind 1, 2, 3 follows 4, and later 7."""


def test_the_right_path_goes_to_children_only() -> None:
    tree = Proposal((4, 7, 5, 8), 0, (ROOT, ROOT, 0, 1))
    assert right_path(tree, [7, 8, 9]) == [1, 3]
    assert right_path(tree, [4, 8]) == [0]
    assert right_path(tree, [8]) == []
    assert right_path(Proposal((4, 5)), [4, 5, 6]) == [0, 1]


@pytest.mark.parametrize(("widths", "steps"), [((), 2), ((2,), 1)])
def test_a_tree_has_the_continuation_that_is_not_the_latest(widths: tuple[int, ...], steps: int) -> None:
    text = RecordedOutput((*FORKED, 1, 2), (3, 4, 5))
    policy = DraftPolicy(NGramDrafter(widths=widths), 15, 16, PagePool(1))
    assert num_steps(text, policy, AttemptId(RequestId("r"), 1), 7) == steps
