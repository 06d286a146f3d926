"""Translates domain values to protobuf messages and errors to gRPC status, and back.

The wire carries single-precision floats. Only `to_float32` rounds to them, so every process samples with bit-equal
parameters.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from baton.domain.errors import (
    BatonError,
    Broken,
    Cancelled,
    DeadlineExceeded,
    Draining,
    IntegrityFailure,
    Interrupted,
    LinkBroken,
    ModelNotFound,
    NeedMedia,
    NoWorkers,
    Overloaded,
    PageVerdict,
    Refused,
    Superseded,
    WorkerLost,
    from_code,
)
from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import (
    EngineRequest,
    FinishReason,
    OutputToken,
    SamplingParams,
    StopParams,
    TokenLogprobs,
)
from baton.domain.scores.prompt_scores import PromptScores
from baton.rpc.gen import common_pb2 as pb
from baton.rpc.media.span_codec import decode_media, encode_media
from baton.rpc.tokens.constraint_codec import decode_constraint, encode_constraint

MAX_SCORE_NUMBERS = 1 << 16
"""Numbers of a message of scores: 256 KiB."""

CODE_METADATA_KEY = "baton-code"
RETRY_METADATA_KEY = "baton-retry-after-s"
MAX_RETRY_AFTER_S = 600.0
"""Longest `retry_after_s` that is taken from a peer."""
Message = TypeVar("Message")
_SINGLE = struct.Struct("<f")

# The first class that matches decides.
_STATUS: tuple[tuple[type[BatonError], grpc.StatusCode], ...] = (
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoWorkers, grpc.StatusCode.UNAVAILABLE),
    (Draining, grpc.StatusCode.UNAVAILABLE),
    (ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (Refused, grpc.StatusCode.INVALID_ARGUMENT),
    (Superseded, grpc.StatusCode.FAILED_PRECONDITION),
    (Interrupted, grpc.StatusCode.ABORTED),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Broken, grpc.StatusCode.INTERNAL),
    (BatonError, grpc.StatusCode.UNKNOWN),
)

_FINISH_TO_PB = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_VERDICT_TO_PB = {
    None: pb.PAGE_VERDICT_UNSPECIFIED,
    PageVerdict.SOURCE: pb.PAGE_VERDICT_SOURCE,
    PageVerdict.LINK: pb.PAGE_VERDICT_LINK,
    PageVerdict.PULLER: pb.PAGE_VERDICT_PULLER,
}
_VERDICT_FROM_PB = {value: verdict for verdict, value in _VERDICT_TO_PB.items()}
_FINISH_FROM_PB = {value: reason for reason, value in _FINISH_TO_PB.items()}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Received bytes that are no message of the expected type. The connection that carried them counts as broken.

    `forged`: they may be one, but the called worker has not sent it, or not now.
    """

    num_bytes: int
    forged: bool = False

    @property
    def error(self) -> LinkBroken:
        """The error of the attempt that needed the message: another try may succeed."""
        why = "is not the called worker's next reply: its tag does not fit" if self.forged else "cannot be read"
        return LinkBroken(f"a message of {self.num_bytes} bytes {why}")


def read(parse: Callable[[bytes], Message], data: bytes | None) -> Message | Unreadable:
    """Parses a received message. gRPC itself would answer INTERNAL or pass on None for bytes that do not parse.

    `data` None: the call ended well without its message.
    """
    if data is None:
        return Unreadable(0)
    try:
        return parse(data)
    except DecodeError:
        return Unreadable(len(data))


def to_float32(value: float) -> float:
    """`value` rounded to the nearest to_float32-precision float. Raises `OverflowError` beyond its range."""
    if value == 0.0 or value == 1.0:  # of almost all parameters
        return float(value)
    return float(_SINGLE.unpack(_SINGLE.pack(value))[0])


def encode_id(id: AttemptId) -> pb.AttemptId:
    """To the wire."""
    return pb.AttemptId(request_id=id.request_id, attempt=id.attempt, owner_tag=id.owner_tag)


def decode_id(message: pb.AttemptId) -> AttemptId:
    """From the wire."""
    return AttemptId(RequestId(message.request_id), message.attempt, message.owner_tag)


def encode_sampling(sampling: SamplingParams) -> pb.SamplingParams:
    """To the wire, rounding floats."""
    message = pb.SamplingParams()
    _fill_sampling(message, sampling)
    return message


def _fill_sampling(message: pb.SamplingParams, sampling: SamplingParams) -> None:
    """Writes into an empty message. What few requests have is not touched where it is empty."""
    message.temperature = to_float32(sampling.temperature)
    message.top_k = sampling.top_k
    message.top_p = to_float32(sampling.top_p)
    message.min_p = to_float32(sampling.min_p)
    message.presence_penalty = to_float32(sampling.presence_penalty)
    message.frequency_penalty = to_float32(sampling.frequency_penalty)
    message.repetition_penalty = to_float32(sampling.repetition_penalty)
    message.seed = sampling.seed
    if sampling.logprobs is not None:
        message.logprobs = sampling.logprobs
    for token, bias in sampling.logit_bias:
        message.logit_bias[token] = to_float32(bias)
    if sampling.allowed_token_ids:
        message.allowed_token_ids.extend(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        message.bad_words.add(tokens=word)
    if sampling.logprob_token_ids:
        message.logprob_token_ids.extend(sampling.logprob_token_ids)


def decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    """From the wire."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.tokens) for word in message.bad_words),
        logprob_token_ids=tuple(message.logprob_token_ids),
    )


def encode_stop(stop: StopParams) -> pb.StopParams:
    """To the wire."""
    message = pb.StopParams()
    _fill_stop(message, stop)
    return message


def _fill_stop(message: pb.StopParams, stop: StopParams) -> None:
    message.max_tokens = stop.max_tokens
    message.min_tokens = stop.min_tokens
    if stop.stop_token_ids:
        message.stop_token_ids.extend(sorted(stop.stop_token_ids))


def decode_stop(message: pb.StopParams) -> StopParams:
    """From the wire."""
    return StopParams(message.max_tokens, message.min_tokens, frozenset(message.stop_token_ids))


def encode_request(request: EngineRequest) -> pb.EngineRequest:
    """To the wire."""
    message = pb.EngineRequest()
    fill_request(message, request)
    return message


def fill_request(message: pb.EngineRequest, request: EngineRequest) -> None:
    """Writes a request into an empty message, which may be a field: what is given to a constructor is copied."""
    message.id.request_id = request.id.request_id
    message.id.attempt = request.id.attempt
    message.id.owner_tag = request.id.owner_tag
    message.tokens.extend(request.tokens)
    message.num_prompt_tokens = request.num_prompt_tokens
    _fill_sampling(message.sampling, request.sampling)
    _fill_stop(message.stop, request.stop)
    message.salt = request.salt
    message.priority = request.priority
    if request.constraint is not None:
        message.constraint.CopyFrom(encode_constraint(request.constraint))
    if request.prompt_logprobs is not None:
        message.prompt_logprobs = request.prompt_logprobs
    if request.media:
        message.media.extend(encode_media(request.media))


def decode_request(message: pb.EngineRequest) -> EngineRequest:
    """From the wire. Raises `InvalidRequest` for a constraint or a media span that means nothing."""
    return EngineRequest(
        id=decode_id(message.id),
        tokens=tuple(message.tokens),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=decode_sampling(message.sampling),
        stop=decode_stop(message.stop),
        salt=message.salt,
        constraint=decode_constraint(message.constraint) if message.HasField("constraint") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        priority=message.priority,
        media=decode_media(message.media),
    )


def encode_token(token: OutputToken) -> pb.OutputToken:
    """To the wire; log-probabilities are rounded to to_float32 precision."""
    if token.logprobs is None:
        return pb.OutputToken(index=token.index, token=token.token)
    top = [pb.TokenLogprob(token=id, logprob=logprob) for id, logprob in token.logprobs.top]
    return pb.OutputToken(index=token.index, token=token.token, logprob=token.logprobs.logprob, top=top)


def decode_token(message: pb.OutputToken) -> OutputToken:
    """From the wire."""
    if not message.HasField("logprob"):
        return OutputToken(message.index, message.token)
    top = tuple((entry.token, entry.logprob) for entry in message.top)
    return OutputToken(message.index, message.token, TokenLogprobs(message.logprob, top))


def encode_scores(scores: PromptScores) -> list[pb.PromptScores]:
    """To the wire, in messages of bounded size, each with its check number."""
    messages = []
    for part in scores.split(MAX_SCORE_NUMBERS):
        message = pb.PromptScores(
            first=part.first,
            k=part.k,
            logprobs=part.logprobs,
            ranks=part.ranks,
            top_ids=part.top_ids,
            top_logprobs=part.top_logprobs,
        )
        message.check = _check_of(message)
        messages.append(message)
    return messages


def decode_scores(message: pb.PromptScores) -> PromptScores:
    """From the wire. Raises `LinkBroken` if they are not those that were sent."""
    if message.check != _check_of(message):
        raise LinkBroken("scores were damaged on their way: their check number differs")
    try:
        packed = (message.logprobs, message.ranks, message.top_ids, message.top_logprobs)
        return PromptScores(message.first, message.k, *packed)
    except ValueError as error:
        raise LinkBroken(str(error)) from None


def _check_of(message: pb.PromptScores) -> int:
    packed = (message.logprobs, message.ranks, message.top_ids, message.top_logprobs)
    return zlib.crc32(b"".join(packed), zlib.crc32(struct.pack("<6I", message.first, message.k, *map(len, packed))))


def encode_finish(reason: FinishReason | None) -> pb.FinishReason:
    """To the wire; None means not finished."""
    return _FINISH_TO_PB[reason]


def decode_finish(value: pb.FinishReason) -> FinishReason | None:
    """From the wire. A reason unknown to this version reads as LENGTH: the peer sends no more."""
    return _FINISH_FROM_PB.get(value, FinishReason.LENGTH)


def encode_failure(error: BatonError) -> pb.Failure:
    """To the wire."""
    failure = pb.Failure(code=error.code, message=str(error))
    if isinstance(error, Superseded) and error.seen is not None:
        failure.seen.CopyFrom(encode_id(error.seen))
    if isinstance(error, IntegrityFailure):
        failure.verdict = encode_verdict(error.verdict)
    if isinstance(error, NeedMedia):
        failure.need_media.extend(error.identities)
    return failure


def decode_failure(message: pb.Failure) -> BatonError:
    """From the wire; an unknown code is a `WorkerLost`."""
    error = from_code(message.code, message.message)
    if isinstance(error, Superseded) and message.HasField("seen"):
        error.seen = decode_id(message.seen)
    if isinstance(error, IntegrityFailure):
        error.verdict = decode_verdict(message.verdict)
    if isinstance(error, NeedMedia):
        error.identities = tuple(message.need_media)
    return error


def encode_verdict(verdict: PageVerdict | None) -> pb.PageVerdict:
    """To the wire; None means not known."""
    return _VERDICT_TO_PB[verdict]


def decode_verdict(value: pb.PageVerdict) -> PageVerdict | None:
    """From the wire; a verdict of a later version is not known."""
    return _VERDICT_FROM_PB.get(value)


def grpc_status(error: BatonError) -> grpc.StatusCode:
    """The gRPC status of `error`."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


async def abort(context: grpc.aio.ServicerContext[object, object], error: BatonError) -> NoReturn:
    """Ends a call with `error`, which the caller reads with `error_from_rpc`. Never returns."""
    await context.abort(grpc_status(error), str(error), _trailing(error))
    raise AssertionError("abort returned")


def rpc_error(error: BatonError) -> grpc.aio.AioRpcError:
    """The error of a call whose reply is refused here; `error_from_rpc` reads it like one that the peer sent."""
    trailing = grpc.aio.Metadata(*_trailing(error))
    return grpc.aio.AioRpcError(grpc_status(error), grpc.aio.Metadata(), trailing, str(error))


def _trailing(error: BatonError) -> tuple[tuple[str, str], ...]:
    """The metadata of an error: its code, and when to try again."""
    code = ((CODE_METADATA_KEY, error.code),)
    if not isinstance(error, Refused) or error.retry_after_s is None:
        return code
    return (*code, (RETRY_METADATA_KEY, f"{error.retry_after_s:.3f}"))


def error_from_rpc(error: grpc.aio.AioRpcError) -> BatonError:
    """The error of a failed call: the one that the peer named, otherwise `WorkerLost`.

    A `Refused` has the peer's `retry_after_s`, `MAX_RETRY_AFTER_S` at most; None if it gave no time, or nonsense.
    A status without our code means that the peer or the path to it is down, or that the call timed out. gRPC's
    text names addresses, so it is the `detail` of the error, for logs, and not in its message.
    """
    named: BatonError | None = None
    retry_after_s: float | None = None
    for key, value in error.trailing_metadata() or ():
        if key == CODE_METADATA_KEY and isinstance(value, str) and named is None:
            named = from_code(value, error.details() or "")
        elif key == RETRY_METADATA_KEY:
            retry_after_s = _read_seconds(value)
    if named is not None:
        if isinstance(named, Refused):
            named.retry_after_s = retry_after_s
        return named
    lost = WorkerLost("a worker cannot be reached, or did not answer")
    lost.detail = f"{error.code().name}: {error.details() or 'no details'}"
    return lost


def _read_seconds(value: str | bytes) -> float | None:
    """A time in metadata of a peer, bounded; None for nonsense."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0.0 else None
