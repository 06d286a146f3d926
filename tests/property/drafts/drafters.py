"""Drafters for tests: one that is right a chosen share of the time, and one that does all that a drafter may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from baton.domain.ids import AttemptId
from baton.engine.batch import Row
from baton.engine.drafts.base import DRAFT_PLACEHOLDER, MAX_TREE_NODES, ROOT, Proposal

RightTokens = Callable[[AttemptId], Sequence[int]]
"""Prompt and output of an attempt, and what the model alone would go on with behind its end."""


class CheckedDrafter:
    """Follows every row and refuses a call that no row's life explains."""

    def __init__(self, right: RightTokens) -> None:
        self._right = right
        self.num_tokens: dict[AttemptId, int] = {}

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        assert id not in self.num_tokens, f"{id} begins twice"
        assert list(tokens) == list(self._right(id)[: len(tokens)]), f"{id} begins with other tokens"
        self.num_tokens[id] = len(tokens)

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        num_tokens = self.num_tokens[id]
        self.num_tokens[id] += len(tokens)
        assert list(tokens) == list(self._right(id)[num_tokens : self.num_tokens[id]]), f"{id} goes on otherwise"

    def end(self, id: AttemptId) -> None:
        self.num_tokens.pop(id, None)

    def next_tokens(self, id: AttemptId, num_tokens: int) -> list[int]:
        """The right tokens behind the row."""
        return list(self._right(id)[self.num_tokens[id] :][:num_tokens])


class OracleDrafter(CheckedDrafter):
    """Each of its tokens is right with a chance of `acceptance`, given that those before it are."""

    def __init__(self, right: RightTokens, acceptance: float, vocab_size: int, seed: int = 0) -> None:
        super().__init__(right)
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._random = Random(seed)

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        tokens = self.next_tokens(id, max_tokens)
        for place, token in enumerate(tokens):
            if self._random.random() >= self._acceptance:
                tokens[place] = (token + 1) % self._vocab_size
        return Proposal(tuple(tokens))


class AdversarialDrafter(CheckedDrafter):
    """Right, wrong, garbage, too long, or nothing, in no order; `kinds` selects some of them."""

    KINDS = ("right", "wrong", "garbage", "too long", "nothing")

    def __init__(self, right: RightTokens, vocab_size: int, seed: int = 0, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(right)
        self._vocab_size = vocab_size
        self._random = Random(seed)
        self._kinds = tuple(kinds)

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        assert max_tokens > 0
        kind = self._random.choice(self._kinds)
        tokens = self.next_tokens(id, 40 if kind == "too long" else max_tokens)
        if kind == "wrong":
            tokens = [(token + 1) % self._vocab_size for token in tokens]
        if kind == "garbage":
            tokens = [self._random.randrange(self._vocab_size) for _ in tokens]
        return Proposal(() if kind == "nothing" else tuple(tokens))


class TreeDrafter(AdversarialDrafter):
    """The adversary with trees: right paths behind wrong siblings, duplicates, bushes, and trees that are too large."""

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        assert max_tokens > 0
        kind = self._random.choice(self._kinds)
        if kind == "nothing":
            return Proposal()
        tokens, parents, wanted = list[int](), list[int](), self.next_tokens(id, max_tokens)
        num_nodes = MAX_TREE_NODES if kind == "too long" else max_tokens + self._random.randrange(4)
        spine, depths = ROOT, {ROOT: 0}  # the right path, as far as the tree has it
        for node in range(num_nodes):
            grows = kind != "wrong" and depths[spine] < len(wanted) and self._random.random() < 0.5
            parent = spine if grows or self._random.random() < 0.5 else self._random.randrange(-1, node)
            right = wanted[depths[parent]] if depths[parent] < len(wanted) else 0
            token = right if grows else self._random.randrange(self._vocab_size)
            if kind == "wrong":
                token = (right + 1) % self._vocab_size
            parents.append(parent)
            tokens.append(token)
            depths[node] = depths[parent] + 1
            if grows:
                spine = node
        return Proposal(tuple(tokens), self._random.randrange(3), tuple(parents))


class MadeDrafter(AdversarialDrafter):
    """The adversary as one whose drafts the runner makes, in the step that verifies them."""

    def __init__(
        self, right: RightTokens, vocab_size: int, seed: int = 0, kinds: Sequence[str] = AdversarialDrafter.KINDS
    ) -> None:
        super().__init__(right, vocab_size, seed, kinds)
        self._held_back: dict[AttemptId, tuple[int, ...]] = {}

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        self._held_back[id] = super().propose(id, max_tokens).tokens[:max_tokens]
        return Proposal((DRAFT_PLACEHOLDER,) * len(self._held_back[id]))

    def make(self, row: Row) -> tuple[int, ...]:
        """The `make_drafts` of a `FakeRunner`."""
        assert row.wanted is not None
        assert row.wanted.request.id == row.id
        return self._held_back[row.id][: row.wanted.count]


class MadeTreeDrafter(MadeDrafter, TreeDrafter):
    """Wants trees of the runner, which makes them for the nodes that the policy has chosen."""

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        tree = TreeDrafter.propose(self, id, max_tokens)
        return Proposal((DRAFT_PLACEHOLDER,) * len(tree.tokens), tree.grade, tree.parents)

    def make(self, row: Row) -> tuple[int, ...]:
        """Right tokens along one path, perhaps, and any others beside it."""
        assert row.wanted is not None
        count = row.wanted.count
        parents = row.wanted.parents or tuple(range(ROOT, count - 1))
        right, depths, spine, drafts = self.next_tokens(row.id, count), {ROOT: 0}, ROOT, list[int]()
        for node, parent in enumerate(parents):
            depth = depths[node] = depths[parent] + 1
            token = right[depth - 1] if depth <= len(right) else 0
            if parent == spine and "right" in self._kinds and self._random.random() < 0.7:
                spine = node
            elif "right" in self._kinds:
                token = self._random.randrange(self._vocab_size)
            else:
                token = (token + 1) % self._vocab_size
            drafts.append(token)
        return tuple(drafts)
