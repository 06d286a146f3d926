"""The tokens that scripted workers produce. All attempts on all workers agree on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.domain.request import EngineRequest, FinishReason
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import ConstraintMatcher, MaskTable


def token_at(index: int) -> int:
    """The output token that every worker produces at an absolute index, if nothing else is said."""
    return 1000 + index


class Speech:
    """A token is a function of its index; the length ends it."""

    def token(self, request: EngineRequest, index: int) -> int:
        """The output token at an absolute index."""
        return token_at(index)

    def finish(self, request: EngineRequest, index: int) -> FinishReason | None:
        """The finish reason that a worker sends with the token at `index`."""
        return FinishReason.LENGTH if index + 1 >= request.stop.max_tokens else None


class ForcedSpeech(Speech):
    """The same tokens for every request; the last one ends it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)

    def token(self, request: EngineRequest, index: int) -> int:
        return self.tokens[index]

    def finish(self, request: EngineRequest, index: int) -> FinishReason | None:
        return FinishReason.STOP if index + 1 == len(self.tokens) else super().finish(request, index)


class ConstrainedSpeech(ForcedSpeech):
    """The wanted token where the constraint of the request allows it, else the lowest that it allows.

    As real workers do, each attempt makes the constraint's state from the tokens that it got and those it added.
    """

    def __init__(self, tokens: Sequence[int], compiler: GrammarCompiler) -> None:
        super().__init__(tokens)
        self._compiler = compiler

    def token(self, request: EngineRequest, index: int) -> int:
        said = list(request.tokens[request.num_prompt_tokens :])
        while len(said) <= index:
            said.append(self._next(request, said))
        return said[index]

    def _next(self, request: EngineRequest, said: Sequence[int]) -> int:
        wanted = self.tokens[len(said)]
        if request.constraint is None:
            return wanted
        state = ConstraintMatcher.of(self._compiler.compile(request.constraint), said)
        row = state.fill(MaskTable(1, self._compiler.tokenizer.num_words), 0, request.stop.stop_token_ids)
        if row is None:
            return wanted
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        return wanted if wanted in allowed else int(allowed[0])
