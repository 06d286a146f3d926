"""Prompts in parts: what was divided comes together, and a part that does not fit is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import InvalidRequest
from baton.rpc.gen import session_pb2 as pb
from baton.session.prompts import PART_BYTES, ReceivedPrompt, split_prompt

PART = PART_BYTES // 4


def join(parts: list[pb.PromptPart], max_tokens: int = 1 << 20) -> ReceivedPrompt:
    assembly = ReceivedPrompt(max_tokens)
    for part in parts:
        assert not assembly.is_complete
        assembly.add(pb.PromptPart.FromString(part.SerializeToString()))
    return assembly


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_a_prompt_comes_together(tokens: list[int]):
    assembly = join(split_prompt(tokens))
    assert assembly.is_complete
    assert assembly.take_tokens().tolist() == tokens


@pytest.mark.parametrize(("num_tokens", "num_parts"), [(0, 1), (1, 1), (PART, 1), (PART + 1, 2), (3 * PART, 3)])
def test_parts_are_bounded_and_only_the_last_says_so(num_tokens: int, num_parts: int):
    parts = split_prompt(range(num_tokens))
    assert len(parts) == num_parts
    assert max(len(part.tokens) for part in parts) <= PART_BYTES
    assert [part.last for part in parts] == [False] * (num_parts - 1) + [True]
    assert join(parts).take_tokens().tolist() == list(range(num_tokens))


def test_a_prompt_that_is_too_long_is_refused():
    join(split_prompt(range(100)), max_tokens=100)
    with pytest.raises(InvalidRequest, match="more than 99 tokens"):
        join(split_prompt(range(100)), max_tokens=99)


def test_parts_that_fit_nowhere_are_refused():
    assembly = ReceivedPrompt(10)
    with pytest.raises(InvalidRequest, match="divides a token"):
        assembly.add(pb.PromptPart(tokens=b"abc"))
    assembly.add(pb.PromptPart(tokens=b"abcd", last=True))
    with pytest.raises(InvalidRequest, match="after its last one"):
        assembly.add(pb.PromptPart(tokens=b"abcd"))
    assert len(assembly.take_tokens()) == 1
