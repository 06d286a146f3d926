"""Rows of tokens: what decode emits is what the router reads."""

from __future__ import annotations

import pytest

from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.domain.timing.attempt_times import DecodeTimes
from baton.rpc.codec import decode_finish, to_float32
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.times_codec import decode_decode_times
from baton.rpc.tokens.row_codec import decode_row, encode_row

TIMES = DecodeTimes(3, 4, 5, 6, 7)
SCORED = tuple(
    OutputToken(index, 40 + index, TokenLogprobs(to_float32(-0.1 * index), ((7, to_float32(-2.5)), (9, -3.0))))
    for index in (5, 6)
)


@pytest.mark.parametrize("tokens", [(OutputToken(0, 0),), (OutputToken(8, 3), OutputToken(9, 4)), SCORED])
def test_tokens_are_the_same_on_the_other_side(tokens: tuple[OutputToken, ...]):
    row = encode_row(tokens, FinishReason.LENGTH, TIMES)
    received = pb.TokenRow.FromString(row.SerializeToString())
    assert decode_row(received) == tokens
    assert decode_finish(received.finish_reason) is FinishReason.LENGTH
    assert decode_decode_times(received.times) == TIMES


def test_a_row_that_does_not_end_its_stream_says_nothing_about_an_end():
    row = encode_row((OutputToken(4, 2),), None, None)
    assert (row.first_index, row.finish_reason, row.HasField("times"), len(row.scores)) == (4, 0, False, 0)


def test_scores_of_other_tokens_are_refused():
    row = encode_row(SCORED, None, None)
    del row.scores[1]
    with pytest.raises(ValueError, match="argument"):
        decode_row(row)
