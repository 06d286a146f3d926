"""Trees of drafts that a draft model or head makes, one generation of nodes after another, all rows side by side.

A node's place among its siblings is its rank: the first child is the token that the target would draw from the
drafter's distribution, the next one what it would draw without that one, and so on. Only nodes with children are run.
They lie in adjacent slots in the order of generations while the tree grows; the step that verifies it writes the draft
layers again, in the slots of the tree. A generation runs all those before it once more: their slots are a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton.model.attention.base import Segment
from baton.model.drafts.chains import DraftRow
from baton.model.sampling.sampler import SamplerBackend, sample_tokens

ROOT = -1
"""The parent of nodes that follow a row's own token, as in `Proposal.parents`."""
DRAWN_LOGIT = -1e30
"""Of a token that an older sibling is. Finite: where no other token is allowed it is drawn again, and no NaN arises."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One run of a drafter: of each row `rows[n]` the tokens of `segments[n]`, flat in `ids` and `positions`.

    `keep`: flat indices of the tokens that have not been run before. Children follow each of them.
    """

    rows: tuple[int, ...]
    segments: tuple[Segment, ...]
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    keep: tuple[int, ...]


LogitsOf = Callable[[Generation], torch.Tensor]
"""Logits [tokens of `keep`, vocab_size], which may be overwritten."""


class GrowingTree:
    """The nodes of one row's tree that have children, in the order of generations: its places. The first is `ROOT`."""

    def __init__(self, row: DraftRow) -> None:
        """Raises `ValueError` if `row.parents` are no tree of `row.count` nodes, parents first."""
        parents = row.parents
        if len(parents) != row.count or any(not ROOT <= parent < node for node, parent in enumerate(parents)):
            raise ValueError(f"{parents} are not the parents of a tree of {row.count} drafts")
        self.row = row
        self.drafts = [0] * row.count
        depths = {ROOT: 0}
        for node, parent in enumerate(parents):
            depths[node] = depths[parent] + 1
        self.children = {node: [child for child, one in enumerate(parents) if one == node] for node in depths}
        self.nodes = sorted((node for node in depths if self.children[node]), key=lambda node: (depths[node], node))
        self.depths = [depths[node] for node in self.nodes]
        self.parents = [-1, *(self.nodes.index(parents[node]) for node in self.nodes[1:])]

    def num_places(self, depth: int) -> int:
        """Places of generations up to `depth`."""
        return sum(one <= depth for one in self.depths)

    def path(self, node: int) -> list[int]:
        """The drafts from the first one to `node`'s."""
        drafts = []
        while node != ROOT:
            drafts.append(self.drafts[node])
            node = self.row.parents[node]
        return drafts[::-1]

    def tokens(self, count: int) -> list[int]:
        """The tokens at the first `count` places."""
        return [self.row.token if node == ROOT else self.drafts[node] for node in self.nodes[:count]]


def make_trees(
    rows: Sequence[DraftRow], logits_of: LogitsOf, sampler: SamplerBackend, sharpness: float = 1.0
) -> list[tuple[int, ...]]:
    """The drafts of each row, in the order of its `parents`, each drawn with the seed and position of its place.

    `sharpness`: as in `make_chains`, whose drafts first children are. Raises `ValueError` for a row without a tree.
    """
    trees = [GrowingTree(row) for row in rows]
    for depth in range(max((tree.depths[-1] + 1 for tree in trees), default=0)):
        growing = [index for index, tree in enumerate(trees) if depth in tree.depths]
        generation = _generation(trees, growing, depth)
        logits = logits_of(generation)
        parents = [(trees[index], node) for index in growing for node in _nodes_at(trees[index], depth)]
        _draw_children(parents, logits, sampler, sharpness)
    return [tuple(tree.drafts) for tree in trees]


def _nodes_at(tree: GrowingTree, depth: int) -> list[int]:
    return [node for node, one in zip(tree.nodes, tree.depths, strict=True) if one == depth]


def _generation(trees: Sequence[GrowingTree], growing: Sequence[int], depth: int) -> Generation:
    segments, ids, positions, keep = list[Segment](), list[int](), list[int](), list[int]()
    for tree in (trees[index] for index in growing):
        count, row = tree.num_places(depth), tree.row
        parents = tuple(tree.parents[:count]) if count > 1 else ()
        segments.append(Segment(len(ids), row.start, count, row.pages, parents=parents))
        ids += tree.tokens(count)
        positions += [row.start + one for one in tree.depths[:count]]
        keep += range(len(ids) - len(_nodes_at(tree, depth)), len(ids))
    return Generation(tuple(growing), tuple(segments), tuple(ids), tuple(positions), tuple(keep))


def _draw_children(
    parents: Sequence[tuple[GrowingTree, int]], logits: torch.Tensor, sampler: SamplerBackend, sharpness: float
) -> None:
    """Draws the children of nodes, whose `logits` are [parents, vocab_size]: the eldest of all, the next ones, ..."""
    specs = [tree.row.spec(tree.path(node), sharpness) for tree, node in parents]
    children = [tree.children[node] for tree, node in parents]
    for rank in range(max(map(len, children))):
        asking = [place for place, nodes in enumerate(children) if len(nodes) > rank]
        rows = logits if len(asking) == len(parents) else logits[asking]
        drawn = sample_tokens(rows, [specs[place] for place in asking], sampler, {}).read()
        for place, sampled in zip(asking, drawn, strict=True):
            parents[place][0].drafts[children[place][rank]] = sampled.token
            logits[place, sampled.token] = DRAWN_LOGIT
