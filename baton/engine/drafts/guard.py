"""Keeps a drafter from harming its worker: wrong ids are cut off, and one that raises or is slow is turned off.

Output never depends on a drafter, so a worker goes on without it. Used around every drafter, on the engine thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.domain.ids import AttemptId
from baton.engine.drafts.base import DRAFT_PLACEHOLDER, MAX_TREE_NODES, NO_PROPOSAL, ROOT, Drafter, Proposal

MAX_MEAN_CALL_S = 0.002
"""Longest mean duration of the calls of a drafter that stays on."""
NUM_CALLS = 64
"""Calls over which the mean is taken."""

T = TypeVar("T")


class GuardedDrafter:
    """A `Drafter` around another one. `on_off` gets the reason, once, when that one is turned off."""

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        on_off: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
        *,
        allows_placeholders: bool = False,
    ) -> None:
        """`allows_placeholders`: the runner can make the drafts that `DRAFT_PLACEHOLDER` stands for."""
        self._drafter: Drafter | None = drafter
        self._vocab_size = vocab_size
        self._on_off = on_off
        self._allows_placeholders = allows_placeholders
        self._clock = clock
        self._num_calls = 0
        self._seconds = 0.0

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """See `Drafter.begin`."""
        self._call(lambda drafter: drafter.begin(id, tokens, salt))

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """See `Drafter.accepted`."""
        self._call(lambda drafter: drafter.accepted(id, tokens))

    def end(self, id: AttemptId) -> None:
        """See `Drafter.end`."""
        self._call(lambda drafter: drafter.end(id))

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """See `Drafter.propose`. Cut to `max_tokens`, and before the first id that is none of the vocabulary.

        A tree is cut to `MAX_TREE_NODES`, and before the first token without a parent before it.
        """
        proposal = self._call(lambda drafter: self._cut(drafter.propose(id, max_tokens), max_tokens))
        return NO_PROPOSAL if proposal is None else proposal

    def _cut(self, proposal: Proposal, max_tokens: int) -> Proposal:
        """`proposal` up to the first token that no step could verify."""
        parents = proposal.parents
        tokens = proposal.tokens[: MAX_TREE_NODES if parents else max_tokens]
        if not (self._allows_placeholders and all(token == DRAFT_PLACEHOLDER for token in tokens)):
            tokens = tuple(itertools.takewhile(self._is_known, tokens))
        if parents:
            known = itertools.takewhile(lambda pair: _is_parent(pair[1], pair[0]), enumerate(parents[: len(tokens)]))
            count = sum(1 for _ in known)
            return Proposal(tokens[:count], proposal.grade, parents[:count])
        return proposal if len(tokens) == len(proposal.tokens) else Proposal(tokens, proposal.grade)

    def _is_known(self, token: int) -> bool:
        return type(token) is int and 0 <= token < self._vocab_size

    def _call(self, call: Callable[[Drafter], T]) -> T | None:
        if self._drafter is None:
            return None
        began = self._clock()
        try:
            result = call(self._drafter)
        except Exception as error:  # a plugin may raise anything; no output depends on it
            self._turn_off(f"it raised {error!r}")
            return None
        self._seconds += self._clock() - began
        self._num_calls += 1
        if self._num_calls == NUM_CALLS:
            if self._seconds > MAX_MEAN_CALL_S * NUM_CALLS:
                self._turn_off(f"its calls take {1000 * self._seconds / NUM_CALLS:.1f} ms")
            self._num_calls, self._seconds = 0, 0.0
        return result

    def _turn_off(self, reason: str) -> None:
        self._drafter = None
        self._on_off(reason)


def _is_parent(parent: int, node: int) -> bool:
    return type(parent) is int and ROOT <= parent < node
