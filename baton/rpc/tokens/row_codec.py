"""Rows of tokens in a session: one a stream and step. Used by decode workers and routers."""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.domain.timing.attempt_times import DecodeTimes
from baton.rpc.codec import encode_finish
from baton.rpc.gen import common_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.times_codec import encode_decode_times


def encode_row(tokens: Sequence[OutputToken], finish: FinishReason | None, times: DecodeTimes | None) -> pb.TokenRow:
    """The row of consecutive tokens, at least one, without its stream."""
    row = pb.TokenRow(first_index=tokens[0].index, tokens=[token.token for token in tokens])
    if finish is not None:
        row.finish_reason = encode_finish(finish)
    if times is not None:
        row.times.CopyFrom(encode_decode_times(times))
    if tokens[0].logprobs is not None:
        row.scores.extend(map(_encode_scores, tokens))
    return row


def decode_row(row: pb.TokenRow) -> tuple[OutputToken, ...]:
    """The tokens of a row. Raises `ValueError` for scores of another number of tokens."""
    if not row.scores:
        tokens, first = row.tokens, row.first_index
        if len(tokens) == 1:  # of almost all rows
            return (OutputToken(first, tokens[0]),)
        return tuple(OutputToken(index, token) for index, token in enumerate(tokens, start=first))
    pairs = zip(row.tokens, row.scores, strict=True)
    return tuple(
        OutputToken(index, token, _decode_scores(scores))
        for index, (token, scores) in enumerate(pairs, start=row.first_index)
    )


def _encode_scores(token: OutputToken) -> pb.TokenScores:
    if token.logprobs is None:
        return pb.TokenScores()
    top = [common_pb2.TokenLogprob(token=id, logprob=logprob) for id, logprob in token.logprobs.top]
    return pb.TokenScores(logprob=token.logprobs.logprob, top=top)


def _decode_scores(scores: pb.TokenScores) -> TokenLogprobs | None:
    if not scores.HasField("logprob"):
        return None
    return TokenLogprobs(scores.logprob, tuple((entry.token, entry.logprob) for entry in scores.top))
