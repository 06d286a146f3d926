"""A simulated worker's drafter: it knows the fake model, and proposes right tokens, wrong ones, or any.

Without limits of taste: it also proposes tokens behind the end of an output. A run with it must look like one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from baton.domain.ids import AttemptId
from baton.domain.request import EngineRequest, banned_tokens
from baton.engine.drafts.base import ROOT, Proposal
from baton.engine.fake_runner import fake_token
from simulation.checks.invariants import Violation
from simulation.scenario import VOCAB_SIZE
from simulation.vision.images import with_rows

MAX_DRAFTS = 4


class SimDrafter:
    """`request_of` finds the request of a row; `version` is that of the worker's model. `trees`: it makes some."""

    def __init__(
        self, rng: Random, request_of: Callable[[AttemptId], EngineRequest], version: int, trees: bool = False
    ) -> None:
        self._rng = rng
        self._request_of = request_of
        self._version = version
        self._trees = trees
        self._rows: dict[AttemptId, list[int]] = {}

    @property
    def num_rows(self) -> int:
        """Rows that have begun and not ended."""
        return len(self._rows)

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """See `Drafter.begin`."""
        if id in self._rows:
            raise Violation("I4", f"the drafter was told twice that {id} begins")
        self._rows[id] = list(tokens)

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """See `Drafter.accepted`. The tokens must be the model's: no draft becomes output unseen.

        Tokens of a constrained row depend on its grammar too; the client checks them.
        """
        constrained = self._request_of(id).constraint is not None
        for token in tokens:
            if not constrained and token != self._next_token(id, self._rows[id]):
                raise Violation("I2", f"{id} emitted {token}, which its model does not say")
            self._rows[id].append(token)

    def end(self, id: AttemptId) -> None:
        """See `Drafter.end`."""
        self._rows.pop(id, None)

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """See `Drafter.propose`. Sometimes more than that."""
        kind = self._rng.choice(["right", "right", "partly", "any", "long", "none"] + 4 * ["tree"] * self._trees)
        if kind == "none":
            return Proposal()
        if kind == "tree":
            return self._tree(id, max_tokens)
        row = list(self._rows[id])
        tokens = []
        for place in range(max_tokens + (3 if kind == "long" else 0)):
            lies = kind == "any" or (kind == "partly" and place >= 1)
            row.append(self._rng.randrange(VOCAB_SIZE) if lies else self._next_token(id, row))
            tokens.append(row[-1])
        return Proposal(tuple(tokens))

    def _tree(self, id: AttemptId, max_tokens: int) -> Proposal:
        """A right path among branches of any tokens, with more nodes than a step takes."""
        tokens, parents, spine, row = list[int](), list[int](), ROOT, list(self._rows[id])
        for node in range(max_tokens + 2):
            grows = self._rng.random() < 0.6
            token = self._next_token(id, row) if grows else self._rng.randrange(VOCAB_SIZE)
            parents.append(spine if grows or self._rng.random() < 0.5 else self._rng.randrange(ROOT, node))
            tokens.append(token)
            if grows:
                row.append(token)
                spine = node
        return Proposal(tuple(tokens), 0, tuple(parents))

    def _next_token(self, id: AttemptId, row: Sequence[int]) -> int:
        request = self._request_of(id)
        history, stop = with_rows(row, request.media), request.stop
        banned = banned_tokens(stop, len(history) - request.num_prompt_tokens)
        seed = 0 if request.sampling.greedy else request.sampling.seed
        allowed = request.sampling.allowed_token_ids
        return fake_token(history, VOCAB_SIZE, seed + self._version, banned, allowed=allowed)
