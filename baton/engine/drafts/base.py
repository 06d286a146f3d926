"""The interface of a drafter: it proposes tokens behind a row, and a step verifies them by drawing.

A draft counts if it equals the token that the sampler draws at its place, with the seed and position of plain decoding.
So a drafter changes how many tokens a step gives, never which. Pure: the decode scheduler calls it in every step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.ids import AttemptId
from baton.domain.request import SampledToken, StopParams, finish_reason


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a row. `grade` groups proposals that are equally likely to be accepted.

    A chain, if `parents` is empty: each token follows the one before it. Otherwise a tree: `parents[i]` < i is the
    index of the token that token i follows, `ROOT` for the row's last one. Siblings are in the order of their chance.
    The tokens are all known, or all `DRAFT_PLACEHOLDER`.
    """

    tokens: tuple[int, ...] = ()
    grade: int = 0
    parents: tuple[int, ...] = ()

    def first(self, count: int) -> Proposal:
        """Its first `count` tokens: of a tree a tree, as parents come first."""
        if count >= len(self.tokens):
            return self
        return Proposal(self.tokens[:count], self.grade, self.parents[:count])

    def only(self, nodes: Sequence[int]) -> Proposal:
        """The tree of these tokens, in their order; each comes behind its parent, which is among them."""
        places = {node: place for place, node in enumerate(nodes)} | {ROOT: ROOT}
        parents = tuple([places[self.parents[node]] for node in nodes])
        return Proposal(tuple([self.tokens[node] for node in nodes]), self.grade, parents)


ROOT = -1
"""The parent of drafts that follow the row's last token."""
NO_PROPOSAL = Proposal()
MAX_TREE_NODES = 64
"""Tokens of a proposed tree."""
DRAFT_PLACEHOLDER = -1
"""Stands for a draft that the runner makes at the start of the step that verifies it."""


class Drafter(Protocol):
    """Proposes tokens for the rows of one worker. Used from the engine thread; keeps nothing after `end`."""

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """A row joins with `tokens`, prompt and output. They must be copied: the caller's list grows.

        Rows of another `salt` must not profit from them: it tells tenants apart. One negative token stands for the
        rows of an image, another for those of the next one: proposals are cut before it.
        """
        ...

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """At most `max_tokens` tokens to verify behind the row's last one.

        A tree may have more, at most `MAX_TREE_NODES`, of which the policy chooses; none is deeper than `max_tokens`.
        """
        ...

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """The row has `tokens` more, drafted or not."""
        ...

    def end(self, id: AttemptId) -> None:
        """The row has ended. Idempotent."""
        ...


def simplest(proposal: Proposal) -> Proposal:
    """`proposal`, as a chain if it is a tree without branches."""
    is_chain = proposal.parents == tuple(range(ROOT, len(proposal.tokens) - 1))
    return Proposal(proposal.tokens, proposal.grade) if is_chain else proposal


def first_chain(tree: Proposal, max_tokens: int) -> Proposal:
    """The chain of a tree's first children."""
    chain: list[int] = []
    for node, parent in enumerate(tree.parents):
        if len(chain) < max_tokens and parent == (chain[-1] if chain else ROOT):
            chain.append(node)
    return Proposal(tuple([tree.tokens[node] for node in chain]), tree.grade)


def draft_path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes of a tree from the first token of a path to `node`; none for `ROOT`."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def sibling_ranks(parents: Sequence[int]) -> list[int]:
    """For each node of a tree how many siblings are before it."""
    seen: Counter[int] = Counter()
    ranks = []
    for parent in parents:
        ranks.append(seen[parent])
        seen[parent] += 1
    return ranks


def num_off_chain(parents: Sequence[int], path: Sequence[int]) -> int:
    """How many nodes of a path a tree's chain of first children does not have."""
    ranks = sibling_ranks(parents)
    return len(path) - sum(1 for _ in itertools.takewhile(lambda node: ranks[node] == 0, path))


def draft_depths(parents: Sequence[int]) -> list[int]:
    """For each node of a tree the number of tokens of its path, itself included."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def emitted_tokens(
    drafts: Sequence[int], sampled: tuple[SampledToken, ...], stop: StopParams, num_output_tokens: int
) -> tuple[SampledToken, ...]:
    """The part of `sampled`, drawn after each of `drafts` and before them, that a row with so many outputs emits.

    It ends with the first token that differs from the draft at its place, or that ends the row.
    """
    count = 1
    for draft, drawn in zip(drafts, sampled, strict=False):
        if drawn.token != draft or finish_reason(stop, drawn.token, num_output_tokens + count) is not None:
            break
        count += 1
    return sampled[:count]


def num_matching(drafts: Sequence[int], sampled: Sequence[SampledToken]) -> int:
    """Number of leading `drafts` that are the tokens drawn at their places."""
    count = 0
    for draft, drawn in zip(drafts, sampled, strict=False):
        if drawn.token != draft:
            break
        count += 1
    return count
