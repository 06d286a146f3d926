"""The state of a constraint: a fold over the output tokens. The only module that reads llguidance's matcher.

`ConstraintMatcher.of(compiled, tokens)` is the state after `tokens`, on any worker and in any attempt. A matcher has
one owner at a time; engines use theirs on the engine thread.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from baton.domain.constraint import Constraint, FreePhase, Phase
from baton.domain.errors import ConstraintFailed, FailedConstraint
from baton.grammar.tokenizer import WORD_BITS, GrammarTokenizer

MaskRow = npt.NDArray[np.uint32]
"""Bit `id % 32` of word `id // 32` is set if the token `id` is allowed."""

_ALL = 0xFFFFFFFF


class MaskTable:
    """Masks of a step, one row of words each, all zero at first.

    The library writes to addresses. The first row's is asked for once: NumPy takes as long for it as the library for
    a small mask.
    """

    def __init__(self, num_rows: int, num_words: int) -> None:
        """`num_words`: of 32 bits, of a mask over the vocabulary."""
        self._rows = np.zeros((num_rows, num_words), np.uint32)
        self._address, self._row_bytes = self._rows.ctypes.data, self._rows.strides[0]

    def row(self, place: int) -> MaskRow:
        """The mask at `place`, not a copy."""
        row: MaskRow = self._rows[place]
        return row

    def fill_from(self, grammar: LLMatcher, place: int) -> MaskRow:
        """Has `grammar` overwrite the mask at `place`."""
        row = self.row(place)
        grammar.unsafe_compute_mask_ptr(self._address + place * self._row_bytes, self._row_bytes)
        return row


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """A constraint with one unused matcher for each of its grammars. Made by `GrammarCompiler`."""

    constraint: Constraint
    tokenizer: GrammarTokenizer
    prototypes: tuple[LLMatcher | None, ...]


class ConstraintMatcher:
    """The tokens that may follow those consumed so far."""

    def __init__(self, compiled: CompiledConstraint) -> None:
        self._compiled = compiled
        self._index = 0  # of the phase
        self._phase: Phase | None = None  # None behind the last: only stop ids
        self._is_last = False  # what follows the phase are stop ids
        self._tokens: list[int] = []  # of a free phase
        self._num_forced = 0  # ids of `on_budget` consumed
        self._matcher: LLMatcher | None = None
        self.num_tokens = 0
        self._enter(0)

    @classmethod
    def of(cls, compiled: CompiledConstraint, tokens: Iterable[int]) -> ConstraintMatcher:
        """The state after `tokens`. Raises `ConstraintFailed` if the constraint does not allow them."""
        matcher = cls(compiled)
        for token in tokens:
            matcher.advance(token)
        return matcher

    @property
    def is_complete(self) -> bool:
        """True if the output may end here."""
        phase = self._phase
        if phase is None:
            return True
        if isinstance(phase, FreePhase):
            return phase.may_stop and self._forced is None
        return self._is_last and self._grammar.is_accepting()

    def copy(self) -> ConstraintMatcher:
        """The same state, which goes on by itself."""
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return other

    def num_allowed(self, tokens: Iterable[int]) -> int:
        """How many of `tokens`, one behind the other, `advance` would consume. Changes nothing."""
        ahead = self.copy()
        for count, token in enumerate(tokens):
            try:
                ahead.advance(token)
            except ConstraintFailed:
                return count
        return ahead.num_tokens - self.num_tokens

    def advance(self, token: int) -> None:
        """Consumes an output token. Raises `ConstraintFailed` if it was not allowed."""
        phase = self._phase
        self.num_tokens += 1
        if phase is None:
            raise _failed(FailedConstraint.PREFIX, f"token {token} follows a complete text")
        if isinstance(phase, FreePhase):
            self._advance_free(phase, token)
        elif not self._grammar.consume_token(token):
            raise _failed(FailedConstraint.PREFIX, f"token {token} at {self.num_tokens - 1} is not allowed there")
        elif not self._is_last and self._ends_here():
            self._enter(self._index + 1)

    def fill(self, table: MaskTable, place: int, stop_ids: Collection[int]) -> MaskRow | None:
        """Sets the bits of the allowed tokens at `place`; None, and the row is not touched, if every token is allowed.

        `stop_ids` end the output where it may end. Raises `ConstraintFailed` if the grammar is too complex or allows
        nothing.
        """
        constraint, phase = self._compiled.constraint, self._phase
        ends = constraint.eos if constraint.eos.issuperset(stop_ids) else constraint.eos.union(stop_ids)
        avoided = ends if self.num_tokens < constraint.min_tokens else constraint.eos if constraint.ignore_eos else ()
        if isinstance(phase, FreePhase):
            banned = phase.banned if phase.may_stop else phase.banned | ends
            if self._forced is None and not banned and not avoided:
                return None
            row = table.row(place)
            self._fill_free(row, banned)
        elif phase is None:
            row = table.row(place)
            row[:] = 0
            _set_bits(row, ends)
        else:
            row = self._fill_grammar(table, place, ends)
        _avoid(row, avoided)
        if not np.count_nonzero(row):
            raise _failed(FailedConstraint.DEAD_END, f"nothing may follow the first {self.num_tokens} tokens")
        return row

    @property
    def _grammar(self) -> LLMatcher:
        if self._matcher is None:
            raise ValueError("a free phase has no grammar")
        return self._matcher

    @property
    def _forced(self) -> int | None:
        """The only allowed token of a free phase that is over its budget."""
        phase = self._phase
        if not isinstance(phase, FreePhase) or phase.budget is None or len(self._tokens) < phase.budget:
            return None
        return phase.on_budget[self._num_forced]

    def _enter(self, index: int) -> None:
        constraint = self._compiled.constraint
        if index == len(constraint.phases) and constraint.loop_to is not None:
            index = constraint.loop_to
        self._index, self._tokens, self._num_forced, self._matcher = index, [], 0, None
        self._phase = constraint.phases[index] if index < len(constraint.phases) else None
        self._is_last = index == len(constraint.phases) - 1 and constraint.loop_to is None
        if index < len(constraint.phases) and (prototype := self._compiled.prototypes[index]) is not None:
            self._matcher = prototype.deep_copy()

    def _advance_free(self, phase: FreePhase, token: int) -> None:
        forced = self._forced
        if forced is not None:
            if token != forced:
                raise _failed(FailedConstraint.PREFIX, f"token {token} is over the budget of {phase.budget} tokens")
            self._num_forced += 1
            if self._num_forced == len(phase.on_budget):
                self._enter(self._index + 1)
            return
        self._tokens.append(token)
        if any(tuple(self._tokens[-len(end) :]) == end for end in phase.ends):
            self._enter(self._index + 1)

    def _ends_here(self) -> bool:
        """True if the grammar is complete and nothing of it may follow. Depends on the tokens only.

        The library may notice the end only with the next mask, so an accepting state is asked for its mask.
        """
        if self._grammar.is_stopped() or not self._grammar.is_accepting():
            return self._grammar.is_accepting()
        row = self._fill_grammar(MaskTable(1, self._compiled.tokenizer.num_words), 0, ())
        return not np.count_nonzero(row)

    def _fill_free(self, row: MaskRow, banned: Collection[int]) -> None:
        forced = self._forced
        if forced is not None:
            row[:] = 0
            _set_bits(row, (forced,))
            return
        row[:] = _ALL
        extra = len(row) * WORD_BITS - self._compiled.tokenizer.vocab_size
        if extra:
            row[-1] = _ALL >> extra
        _clear_bits(row, banned)

    def _fill_grammar(self, table: MaskTable, place: int, ends: Collection[int]) -> MaskRow:
        """Bits of the grammar. Stop ids stand for the end of the text, in the last phase."""
        grammar, is_accepting = self._grammar, self._grammar.is_accepting()
        row = table.fill_from(grammar, place)
        if grammar.is_error():
            raise _failed(FailedConstraint.TOO_COMPLEX, one_line(grammar.get_error()))
        if is_accepting:
            _clear_bits(row, self._compiled.tokenizer.eos)
            if self._is_last:
                _set_bits(row, ends)
        return row


def _avoid(row: MaskRow, avoided: Collection[int]) -> None:
    if not avoided:
        return
    kept = row.copy()
    _clear_bits(kept, avoided)
    if kept.any():
        row[:] = kept


def _set_bits(row: MaskRow, tokens: Collection[int]) -> None:
    for token in tokens:
        row[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)


def _clear_bits(row: MaskRow, tokens: Collection[int]) -> None:
    for token in tokens:
        row[token // WORD_BITS] &= np.uint32(_ALL ^ (1 << token % WORD_BITS))


def is_allowed(row: MaskRow, token: int) -> bool:
    """True if the token's bit is set."""
    return bool(row[token // WORD_BITS] >> np.uint32(token % WORD_BITS) & np.uint32(1))


def one_line(message: str) -> str:
    """A library's message on one line, at most 300 characters."""
    return " ".join(message.split())[:300] or "no reason was given"


def _failed(reason: FailedConstraint, why: str) -> ConstraintFailed:
    return ConstraintFailed(f"the output cannot be constrained: {why}", reason)
