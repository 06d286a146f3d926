"""The events of an attempt on the wire: as messages of `Generate`, and as those of a session."""

from __future__ import annotations

from baton.engine.messages import Fail, Scored
from baton.rpc import codec
from baton.rpc.gen import common_pb2, decode_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.times_codec import encode_decode_times, encode_import_times
from baton.rpc.tokens.row_codec import encode_row
from baton.rpc.tokens.token_check import set_check
from baton.services.decode.effects import EmitTokens, ReportImported
from baton.services.decode.serving.attempts import DecodeStreamEvent


def encode_call_events(event: DecodeStreamEvent) -> list[decode_pb2.GenerateEvent]:
    """For the stream of a `Generate` call."""
    match event:
        case EmitTokens(_, tokens, finish, times):
            message = decode_pb2.Tokens(
                tokens=[codec.encode_token(token) for token in tokens],
                finish_reason=codec.encode_finish(finish),
                times=None if times is None else encode_decode_times(times),
            )
            set_check(message)
            return [decode_pb2.GenerateEvent(tokens=message)]
        case ReportImported():
            imported = decode_pb2.Imported(
                times=encode_import_times(event.times), first_token=codec.encode_token(event.first_token)
            )
            return [decode_pb2.GenerateEvent(imported=imported)]
        case Scored(_, scores):
            return [decode_pb2.GenerateEvent(scores=message) for message in codec.encode_scores(scores)]
        case Fail():
            return [decode_pb2.GenerateEvent(failed=_encode_failure(event))]


def encode_session_events(event: DecodeStreamEvent) -> list[pb.StreamMessage | pb.TokenRow]:
    """For a session, without the stream. Frames carry a tag, so rows have no check number of their own."""
    match event:
        case EmitTokens(_, tokens, finish, times):
            return [encode_row(tokens, finish, times)]
        case ReportImported():
            joined = pb.Joined(
                times=encode_import_times(event.times), first_token=codec.encode_token(event.first_token)
            )
            return [pb.StreamMessage(joined=joined)]
        case Scored(_, scores):
            return [pb.StreamMessage(scores=message) for message in codec.encode_scores(scores)]
        case Fail():
            return [pb.StreamMessage(ended=pb.Ended(failure=_encode_failure(event)))]


def _encode_failure(event: Fail) -> common_pb2.Failure:
    failure = codec.encode_failure(event.error)
    if event.times is not None:
        failure.decode.CopyFrom(encode_decode_times(event.times))
    return failure
