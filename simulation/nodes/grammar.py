"""Grammars over the simulated vocabulary: token n is the digit n, and the last token ends a constrained answer.

The library needs tokens of one byte, so these texts are not those that clients see.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from llguidance import LLTokenizer, TokenizerWrapper

from baton.domain.constraint import Constraint, GrammarPhase
from baton.engine.masks import MaskFiller
from baton.grammar import sources
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import CompiledConstraint
from baton.grammar.tokenizer import GrammarTokenizer
from simulation.scenario import END_TOKEN, VOCAB_SIZE


class SimGrammarTokenizer(GrammarTokenizer):
    """The vocabulary of the fake model."""

    def __init__(self) -> None:
        tokens = [str(token).encode() for token in range(VOCAB_SIZE)]
        source = _Vocabulary(eos_token_id=END_TOKEN, bos_token_id=None, tokens=tokens, special_token_ids=[END_TOKEN])
        self.ll = LLTokenizer(TokenizerWrapper(source), n_vocab=VOCAB_SIZE, eos_token=[END_TOKEN])
        self.vocab_size = VOCAB_SIZE
        self.eos = frozenset({END_TOKEN})


class _Vocabulary(SimpleNamespace):
    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text."""
        return [digit - ord("0") for digit in text]


@cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(SimGrammarTokenizer())


def new_masks() -> MaskFiller:
    """Masks of one worker."""
    return MaskFiller(_compiler())


@cache
def compiled_regex(regex: str) -> CompiledConstraint:
    """The constraint of a client's regular expression."""
    return _compiler().compile(Constraint((GrammarPhase(sources.regex_grammar(regex)),), eos=frozenset({END_TOKEN})))
