"""Grammars over the bundled vocabulary for tests: a compiler, random walks, and the text of tokens."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
from tokenizers import Tokenizer

from baton.bundled import MODEL_DIR
from baton.domain.constraint import Constraint, GrammarPhase
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import ConstraintMatcher, MaskTable
from baton.grammar.tokenizer import GrammarTokenizer

VOCAB_SIZE: int = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))["vocab_size"]
STOP_SHARE = 0.5


@cache
def compiler() -> GrammarCompiler:
    """Of the bundled tokenizer."""
    return GrammarCompiler(GrammarTokenizer.of_directory(MODEL_DIR, VOCAB_SIZE))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def encode(text: str) -> tuple[int, ...]:
    """The tokens of `text`."""
    return tuple(_tokenizer().encode(text, add_special_tokens=False).ids)


def decode(tokens: list[int]) -> str:
    """The text of `tokens`, special ones included."""
    return str(_tokenizer().decode(tokens, skip_special_tokens=False))


def constraint(text: str) -> Constraint:
    """One grammar, ended by the model's own end tokens."""
    return Constraint((GrammarPhase(text),), eos=compiler().tokenizer.eos)


def matcher(constraint: Constraint, tokens: tuple[int, ...] = ()) -> ConstraintMatcher:
    """The state of `constraint` after `tokens`."""
    return ConstraintMatcher.of(compiler().compile(constraint), tokens)


def new_table() -> MaskTable:
    """A table of one mask, without a bit."""
    return MaskTable(1, compiler().tokenizer.num_words)


def allowed(matcher: ConstraintMatcher, stop_ids: frozenset[int] = frozenset()) -> set[int] | None:
    """The allowed tokens; None: every one."""
    row = matcher.fill(new_table(), 0, stop_ids)
    if row is None:
        return None
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def random_text(constraint: Constraint, seed: int, max_tokens: int = 400) -> str | None:
    """The text of a random walk that ends where it may; None if `max_tokens` are not enough."""
    draw, state, tokens = random.Random(seed), matcher(constraint), list[int]()
    while len(tokens) < max_tokens:
        choices = allowed(state)
        assert choices
        ends = choices & constraint.eos
        if ends and (ends == choices or draw.random() < STOP_SHARE):
            return decode(tokens)
        tokens.append(draw.choice(sorted(choices - constraint.eos)))
        state.advance(tokens[-1])
    return None
