"""A drafter whose drafts the runner makes, at the start of the step that verifies them.

It says how many it wants; the model behind it keeps its state in the rows' pages, so there is nothing to begin or end.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

from baton.domain.ids import AttemptId
from baton.engine.drafts.base import DRAFT_PLACEHOLDER, MAX_TREE_NODES, ROOT, Proposal

MAX_RUNNER_DRAFTS = 7
"""Most drafts of a chain, and generations of a tree. They are made one after another, and fewer and fewer are right."""


def max_chain(num_head_layers: int) -> int:
    """Most drafts of a row and step for a head of so many layers, 0 for none: of several, each makes one."""
    return MAX_RUNNER_DRAFTS if num_head_layers < 2 else min(MAX_RUNNER_DRAFTS, num_head_layers)


RANK_COST = 3
"""Generations that a node's rank among its siblings counts as, where a tree is cut to `MAX_TREE_NODES`."""


@functools.lru_cache(maxsize=64)
def placeholder_tree(widths: tuple[int, ...], max_depth: int) -> Proposal:
    """Placeholders of a tree with so many branches at the first depths, and one behind them, `max_depth` deep.

    It has at most `MAX_TREE_NODES` nodes: those of few generations and low ranks.
    """
    parents, heap = list[int](), list[tuple[int, int, int, int]]()
    number = 0  # keeps siblings in order, and makes entries differ

    def add_children(node: int, depth: int, cost: int) -> None:
        nonlocal number
        width = widths[depth] if depth < len(widths) else 1
        for rank in range(width if depth < max_depth else 0):
            heapq.heappush(heap, (cost + 1 + RANK_COST * rank, number, node, depth + 1))
            number += 1

    add_children(ROOT, 0, 0)
    while heap and len(parents) < MAX_TREE_NODES:
        cost, _, parent, depth = heapq.heappop(heap)
        parents.append(parent)
        add_children(len(parents) - 1, depth, cost)
    return Proposal((DRAFT_PLACEHOLDER,) * len(parents), 0, tuple(parents))


class RunnerDrafter:
    """A `Drafter` without tokens of its own. `widths`: of trees, as `--draft-tree` has them; (): it wants chains."""

    def __init__(self, widths: tuple[int, ...] = ()) -> None:
        self._widths = widths

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """See `Drafter.begin`."""

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """See `Drafter.propose`: placeholders for as many drafts as are wanted."""
        depth = min(max_tokens, MAX_RUNNER_DRAFTS)
        return placeholder_tree(self._widths, depth) if self._widths else Proposal((DRAFT_PLACEHOLDER,) * depth)

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """See `Drafter.accepted`."""

    def end(self, id: AttemptId) -> None:
        """See `Drafter.end`."""
