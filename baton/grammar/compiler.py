"""Compiles constraints, under limits, and keeps the last grammars. Thread-safe; takes milliseconds, so off event loops.

Routers call `check` before admission, workers `compile`. Both cache by text: a grammar that was refused is refused
again without a second try.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from baton.domain.constraint import Constraint, GrammarPhase
from baton.domain.errors import ConstraintFailed, FailedConstraint
from baton.grammar.deep_stack import call_deep
from baton.grammar.matcher import CompiledConstraint, ConstraintMatcher, MaskRow, MaskTable, one_line
from baton.grammar.tokenizer import GrammarTokenizer

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

MAX_GRAMMAR_BYTES = 64 * 1024
"""Of all grammars of a constraint together, in UTF-8."""

MAX_COMPILE_S = 0.5
"""CPU time of one grammar."""

PROBE_TOKENS = 16
MAX_PROBE_S = 0.1
"""CPU time of the first masks: some grammars turn out too complex only there."""

MAX_CACHED = 64


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of a grammar. `seconds` and `probe_seconds` are CPU time of the compiling thread."""

    num_bytes: int = MAX_GRAMMAR_BYTES
    seconds: float = MAX_COMPILE_S
    probe_seconds: float = MAX_PROBE_S
    initial_lexer_fuel: int = 500_000
    step_lexer_fuel: int = 100_000
    step_max_items: int = 20_000
    max_grammar_size: int = 100_000

    def of_library(self) -> LLParserLimits:
        """The library's own limits."""
        return LLParserLimits(
            initial_lexer_fuel=self.initial_lexer_fuel,
            step_lexer_fuel=self.step_lexer_fuel,
            step_max_items=self.step_max_items,
            max_grammar_size=self.max_grammar_size,
            verbose_errors=False,
        )


class GrammarCompiler:
    """Compiles for one tokenizer."""

    def __init__(
        self, tokenizer: GrammarTokenizer, limits: GrammarLimits | None = None, max_cached: int = MAX_CACHED
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits or GrammarLimits()
        self._library_limits = self.limits.of_library()
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher | ConstraintFailed] = OrderedDict()
        self._probed: OrderedDict[Constraint, ConstraintFailed | None] = OrderedDict()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Raises `ConstraintFailed` if a grammar is wrong or over a limit."""
        num_bytes = sum(len(text.encode()) for text in constraint.grammars)
        if num_bytes > self.limits.num_bytes:
            raise _too_complex(f"its grammar has {num_bytes} bytes, more than {self.limits.num_bytes}")
        prototypes = (
            self._prototype(phase.text) if isinstance(phase, GrammarPhase) else None for phase in constraint.phases
        )
        return CompiledConstraint(constraint, self.tokenizer, tuple(prototypes))

    def check(self, constraint: Constraint) -> None:
        """Compiles, then walks a few random tokens. Raises `ConstraintFailed`, for an equal constraint the same one."""
        if self.known(constraint):
            return
        try:
            self._probe(self.compile(constraint))
        except ConstraintFailed as error:
            self._keep(self._probed, constraint, error.copy())
            raise
        self._keep(self._probed, constraint, None)

    def known(self, constraint: Constraint) -> bool:
        """True if `check` has found an equal constraint good. Raises its `ConstraintFailed` if it was refused."""
        with self._lock:
            if constraint not in self._probed:
                return False
            self._probed.move_to_end(constraint)
            failed = self._probed[constraint]
        if failed is not None:
            raise failed.copy()
        return True

    def _prototype(self, text: str) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
        if found is None:
            found = call_deep(lambda: self._compile(text))
            self._keep(self._compiled, text, found)
        if isinstance(found, ConstraintFailed):
            raise found.copy()
        return found.deep_copy()

    def _compile(self, text: str) -> LLMatcher | ConstraintFailed:
        """Recurses as deep as the grammar's rules: call it with a deep stack. Copies and masks need none."""
        began = time.thread_time()
        matcher = LLMatcher(self.tokenizer.ll, text, log_level=0, limits=self._library_limits)
        seconds = time.thread_time() - began
        if matcher.is_error():
            return ConstraintFailed(f"the grammar cannot be used: {one_line(matcher.get_error())}")
        if seconds > self.limits.seconds:
            return _too_complex(f"its grammar took {seconds:.1f} s to compile, more than {self.limits.seconds:g} s")
        return matcher

    def _probe(self, compiled: CompiledConstraint) -> None:
        matcher, table = ConstraintMatcher(compiled), MaskTable(1, self.tokenizer.num_words)
        draw, began = random.Random(0), time.thread_time()
        for _ in range(PROBE_TOKENS):
            if (row := matcher.fill(table, 0, ())) is None:
                return
            seconds = time.thread_time() - began
            if seconds > self.limits.probe_seconds:
                raise _too_complex(f"its first tokens took {seconds:.1f} s, more than {self.limits.probe_seconds:g} s")
            token = _draw(row, draw)
            if token in compiled.constraint.eos:
                return
            matcher.advance(token)

    def _keep(self, cache: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
        with self._lock:
            cache[key] = value
            cache.move_to_end(key)
            while len(cache) > self._max_cached:
                cache.popitem(last=False)


def _draw(row: MaskRow, draw: random.Random) -> int:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits)
    return int(allowed[draw.randrange(len(allowed))])


def _too_complex(why: str) -> ConstraintFailed:
    return ConstraintFailed(f"the constraint is too complex: {why}", FailedConstraint.TOO_COMPLEX)
