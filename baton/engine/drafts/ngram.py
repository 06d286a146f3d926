"""Drafts from the row's own tokens: what followed the last time that the text ended as it does now.

Lookup in the prompt (prompt lookup decoding; SuffixDecoding, arXiv:2411.04975), by a suffix automaton over prompt and
output of each request. Requests share nothing, unless there is a `SuffixStore` of earlier outputs: what it finds counts
where it is the longer match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId
from baton.engine.drafts.base import MAX_TREE_NODES, NO_PROPOSAL, Proposal
from baton.engine.drafts.hidden_media import last_text
from baton.engine.drafts.store import SuffixStore
from baton.engine.drafts.suffix_automaton import SuffixAutomaton, SuffixIndex

MIN_MATCH_TOKENS = 3
MAX_CONTINUATIONS = 8
"""Tokens that are remembered behind three others: the latest different ones."""
MAX_GRADED_TOKENS = 16
"""Longer matches are one grade."""
STORED_GRADES = 100
"""Added to the grade of what the store proposes: it is right less often."""
TAIL_TOKENS = 32
"""Tokens at the end of a row that are looked up in the store, and of its prompt that are stored before its output."""
MAX_STEP_TOKENS = 256
"""Tokens that all rows index in a step, so that a long prompt does not delay it: about 1 ms in pure Python."""
MAX_INDEXED_TOKENS = 1 << 19
"""Tokens in all indexes together, 55 to 80 MB; rows beyond get no drafts."""


@dataclass(slots=True)
class _Index:
    suffixes: SuffixIndex
    backlog: list[int]  # tokens that are not indexed yet, in order
    salt: str
    tail: deque[int]
    output: list[int] = field(default_factory=list)  # for the store
    continuations: Continuations = field(default_factory=lambda: Continuations())  # for trees


class Continuations:
    """For each three adjacent tokens of a row the different tokens that followed them, and where they did last.

    Pure Python: about half a microsecond a token.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], dict[int, int]] = {}  # the latest one last

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end."""
        for token in tokens:
            if token >= 0 and len(self._tokens) >= MIN_MATCH_TOKENS:
                ends = self._ends.setdefault(tuple(self._tokens[-MIN_MATCH_TOKENS:]), {})
                ends.pop(token, None)
                ends[token] = len(self._tokens)
                if len(ends) > MAX_CONTINUATIONS:
                    del ends[next(iter(ends))]
            self._tokens.append(token)

    def after(self, drafts: Sequence[int]) -> list[tuple[int, int]]:
        """(token, its place) of what followed the row's end with `drafts` behind it, the latest one first."""
        tail = [*self._tokens[-MIN_MATCH_TOKENS:], *drafts][-MIN_MATCH_TOKENS:]
        return list(self._ends.get(tuple(tail), {}).items())[::-1]


class NGramDrafter:
    """A `Drafter` that proposes what followed the longest match of the row's end, of at least three tokens.

    With `widths` it proposes trees: where a row has widths[d] - 1 other continuations of the three tokens at depth d of
    the chain, each is a branch with what followed it.
    """

    def __init__(
        self,
        max_step_tokens: int = MAX_STEP_TOKENS,
        max_indexed_tokens: int = MAX_INDEXED_TOKENS,
        new_index: Callable[[], SuffixIndex] = SuffixAutomaton,
        store: SuffixStore | None = None,
        widths: tuple[int, ...] = (),
    ) -> None:
        """`max_indexed_tokens`: over all rows; one that does not fit is not indexed.

        `store` None: rows share nothing.
        """
        self._store = store
        self._widths = widths
        self._new_index = new_index
        self._max_step_tokens = max_step_tokens
        self._max_indexed_tokens = max_indexed_tokens
        self._indexes: dict[AttemptId, _Index] = {}
        self._asked: set[AttemptId] = set()  # in this step
        self._num_left = max_step_tokens
        self.num_tokens = 0

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """See `Drafter.begin`. Copies the tokens; later steps index them."""
        if self.num_tokens + len(tokens) <= self._max_indexed_tokens:
            self.num_tokens += len(tokens)
            tail = last_text(tokens, TAIL_TOKENS)
            self._indexes[id] = _Index(self._new_index(), list(tokens), salt, deque(tail, TAIL_TOKENS), list(tail))

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """See `Drafter.accepted`."""
        if (index := self._indexes.get(id)) is None:
            return
        if self.num_tokens + len(tokens) > self._max_indexed_tokens:
            return self.end(id)
        self.num_tokens += len(tokens)
        index.backlog += tokens
        if self._store is not None:
            index.tail.extend(tokens)
            index.output += tokens[: self._store.max_output_tokens - len(index.output)]

    def end(self, id: AttemptId) -> None:
        """See `Drafter.end`."""
        index = self._indexes.pop(id, None)
        self._asked.discard(id)
        if index is None:
            return
        self.num_tokens -= len(index.suffixes) + len(index.backlog)
        if self._store is not None:
            self._store.add(index.salt, index.output)

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """See `Drafter.propose`. The grade is the length of the match. None while tokens of the row wait."""
        if (index := self._indexes.get(id)) is None:
            return NO_PROPOSAL
        self._count_call(id)
        if index.backlog and not self._catch_up(index):
            return NO_PROPOSAL
        chain = self._chain(index, max_tokens)
        return self._tree(index, chain, max_tokens) if self._widths and chain.tokens else chain

    def _chain(self, index: _Index, max_tokens: int) -> Proposal:
        length = index.suffixes.match_length
        if self._store is not None and length < MAX_GRADED_TOKENS:
            least = max(MIN_MATCH_TOKENS, length + 1)
            tokens, stored = self._store.continuation(index.salt, index.tail, least, max_tokens)
            if tokens:
                return Proposal(tokens, STORED_GRADES + min(stored, MAX_GRADED_TOKENS))
        if length < MIN_MATCH_TOKENS:
            return NO_PROPOSAL
        return Proposal(index.suffixes.continuation(max_tokens), min(length, MAX_GRADED_TOKENS))

    def _tree(self, index: _Index, chain: Proposal, max_tokens: int) -> Proposal:
        """`chain` with branches; the chain itself if there are none."""
        tokens, parents = list(chain.tokens), list(range(-1, len(chain.tokens) - 1))
        for depth, width in enumerate(self._widths[: len(chain.tokens)]):
            found = index.continuations.after(chain.tokens[:depth])
            others = [place for token, place in found if token != chain.tokens[depth]]
            for place in others[: width - 1]:
                branch = index.suffixes.continuation_at(place, min(max_tokens - depth, MAX_TREE_NODES - len(tokens)))
                parents += [depth - 1, *range(len(tokens), len(tokens) + len(branch) - 1)][: len(branch)]
                tokens += branch
        if len(tokens) == len(chain.tokens):
            return chain
        return Proposal(tuple(tokens), chain.grade, tuple(parents))

    def _count_call(self, id: AttemptId) -> None:
        """A row that is asked again is in another step."""
        if id in self._asked:
            self._asked.clear()
            self._num_left = self._max_step_tokens
        self._asked.add(id)

    def _catch_up(self, index: _Index) -> bool:
        """Indexes what waits, as far as the step allows; True if nothing waits any more."""
        now = index.backlog[: self._num_left]
        index.suffixes.extend(now)
        if self._widths:
            index.continuations.extend(now)
        self._num_left -= len(now)
        del index.backlog[: len(now)]
        return not index.backlog
