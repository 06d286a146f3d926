"""Rows whose bans leave no token fail, in a step whose other rows go on; the rest is a function of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import ConstraintFailed, FailedConstraint
from baton.domain.request import SamplingParams, bad_word_ends
from baton.engine.batch import MaskSpec, SampleSpec
from baton.engine.masks import StepMasks, check_rows
from baton.grammar import sources
from baton.model.sampling.sampler import sample_tokens
from tests import grammars
from tests.tiny_workers import REPEATABLE_SETTINGS

VOCAB_SIZE = 64
CONSTRAINED = MaskSpec(grammars.constraint(sources.regex_grammar("a+")))


def spec(banned: frozenset[int] = frozenset(), mask: MaskSpec | None = None, **sampling) -> SampleSpec:
    return SampleSpec(SamplingParams(**sampling), [1, 2], 1, banned, mask)


def bits(*tokens: int) -> np.ndarray:
    row = np.zeros(VOCAB_SIZE // 32, np.uint32)
    for token in tokens:
        row[token // 32] |= np.uint32(1 << token % 32)
    return row


@REPEATABLE_SETTINGS
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=4),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_a_word_is_banned_at_its_last_token(words: list[tuple[int, ...]], tokens: list[int], num_prompt: int):
    """A token is banned exactly if the output with it would end in a word."""
    num_prompt = min(num_prompt, len(tokens))
    output = tuple(tokens[num_prompt:])
    expected = {token for token in range(3) for word in words if (*output, token)[-len(word) :] == word}
    assert bad_word_ends(words, tokens, num_prompt) == expected


@pytest.mark.parametrize(
    ("row", "mask", "is_empty"),
    [
        (spec(allowed_token_ids=(3, 40)), None, False),
        (spec(frozenset({3, 40}), allowed_token_ids=(3, 40)), None, True),
        (spec(frozenset({3}), allowed_token_ids=(3, 40)), None, False),
        (spec(allowed_token_ids=(3, 40), mask=CONSTRAINED), bits(5, 40), False),
        (spec(allowed_token_ids=(3,), mask=CONSTRAINED), bits(5, 40), True),
        (spec(frozenset({5, 40}), bad_words=((5,), (40,)), mask=CONSTRAINED), bits(5, 40), True),
        (spec(frozenset({5}), bad_words=((5,),), mask=CONSTRAINED), bits(5, 40), False),
        (spec(frozenset(range(VOCAB_SIZE)), bad_words=((1,),)), None, True),
        (spec(frozenset({5, 40}), mask=CONSTRAINED), bits(5, 40), True),
    ],
)
def test_a_row_without_a_token_fails_alone(row: SampleSpec, mask: np.ndarray | None, is_empty: bool):
    """Every other row of the step has the token that it would have alone."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    other = spec(temperature=1.0, seed=9)
    masks = StepMasks({} if mask is None else {1: mask})
    specs = check_rows([other, row, other], masks, VOCAB_SIZE)
    sampled = sample_tokens(logits, specs, masks=masks.rows).read()
    alone = [sample_tokens(logits[at : at + 1], [other]).read()[0] for at in (0, 2)]
    assert [sampled[0], sampled[2]] == alone
    assert set(masks.failures) == ({1} if is_empty else set())
    if is_empty:
        assert isinstance(masks.failures[1], ConstraintFailed)
        assert masks.failures[1].reason is FailedConstraint.DEAD_END
        return
    token = sampled[1].token
    assert token not in row.banned
    assert token in (row.sampling.allowed_token_ids or range(VOCAB_SIZE))
    assert mask is None or mask[token // 32] >> (token % 32) & 1
