"""Counts of a batch's prompt tokens."""

from __future__ import annotations

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import SamplingParams
from baton.engine.batch import Batch, Row, SampleSpec

ID = AttemptId(RequestId("r"), 1)


@pytest.mark.parametrize(
    ("start", "num_tokens", "num_prompt_tokens", "expected"),
    [(0, 4, 6, 4), (4, 2, 6, 2), (4, 4, 6, 2), (6, 1, 6, 0), (9, 1, 6, 0)],
)
def test_prompt_tokens_of_a_batch(start: int, num_tokens: int, num_prompt_tokens: int, expected: int) -> None:
    spec = SampleSpec(SamplingParams(), list(range(start + num_tokens)), num_prompt_tokens)
    row = Row(ID, [1] * num_tokens, start, [], spec)
    assert Batch((row,)).num_prompt_tokens == expected


def test_a_chunk_without_a_sample_is_all_prompt() -> None:
    row = Row(ID, [1] * 5, 8, [], None)
    assert Batch((row, row)).num_prompt_tokens == 10
