"""Round trips between domain and wire. The only loss is the rounding to single precision."""

import grpc
import numpy as np
import pytest
from grpc.aio import AioRpcError, Metadata
from hypothesis import given
from hypothesis import strategies as st

from baton.domain import errors
from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.ids import AttemptId, RequestId
from baton.domain.media.span import MAX_SPANS, MediaGrid, MediaSpan
from baton.domain.request import EngineRequest, FinishReason, OutputToken, SamplingParams, StopParams, TokenLogprobs
from baton.rpc import codec
from baton.rpc.gen import common_pb2 as pb

uint32 = st.integers(0, 2**32 - 1)
singles = st.floats(-(2.0**100), 2.0**100, width=32)
doubles = st.floats(-(2.0**100), 2.0**100)
ids = st.builds(AttemptId, st.text(max_size=20).map(RequestId), uint32, uint32)


def samplings(floats: st.SearchStrategy[float]) -> st.SearchStrategy[SamplingParams]:
    biases = st.dictionaries(uint32, floats, max_size=5).map(lambda bias: tuple(sorted(bias.items())))
    return st.builds(
        SamplingParams,
        temperature=floats,
        top_k=st.integers(0, 2**31 - 1),
        top_p=floats,
        min_p=floats,
        presence_penalty=floats,
        frequency_penalty=floats,
        repetition_penalty=floats,
        seed=st.integers(-(2**63), 2**63 - 1),
        logit_bias=biases,
        logprobs=st.none() | st.integers(0, 20),
        logprob_token_ids=st.lists(uint32, max_size=3).map(tuple),
    )


stops = st.builds(StopParams, uint32, uint32, st.frozensets(uint32, max_size=5))
phases = st.one_of(
    st.builds(GrammarPhase, st.text(min_size=1, max_size=9)),
    st.builds(
        FreePhase,
        ends=st.lists(st.lists(uint32, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
        budget=st.none() | uint32,
        on_budget=st.lists(uint32, min_size=1, max_size=3).map(tuple),
        may_stop=st.booleans(),
        banned=st.frozensets(uint32, max_size=3),
    ),
)
constraints = st.builds(
    Constraint,
    phases=st.lists(phases, min_size=1, max_size=3).map(tuple),
    loop_to=st.none() | st.just(0),
    eos=st.frozensets(uint32, max_size=3),
    ignore_eos=st.booleans(),
    min_tokens=uint32,
)
grids = st.builds(MediaGrid, st.integers(1, 9), st.integers(1, 9))
identities = st.binary(min_size=16, max_size=16)
spans = st.one_of(
    st.builds(MediaSpan, uint32, st.integers(1, 2**32 - 1), identities, st.none(), uint32),
    st.builds(
        lambda first, identity, grid: MediaSpan(first, grid.height * grid.width, identity, grid),
        *(uint32, identities, grids),
    ),
)
requests = st.builds(
    EngineRequest,
    id=ids,
    tokens=st.lists(uint32, max_size=20).map(tuple),
    num_prompt_tokens=uint32,
    sampling=samplings(singles),
    stop=stops,
    salt=st.text(max_size=10),
    constraint=st.none() | constraints,
    media=st.lists(spans, max_size=3).map(tuple),
)
logprobs = st.builds(TokenLogprobs, singles, st.lists(st.tuples(uint32, singles), max_size=5).map(tuple))
tokens = st.builds(OutputToken, uint32, uint32, st.none() | logprobs)


@given(requests)
def test_requests_survive_the_wire(request):
    wire = codec.encode_request(request).SerializeToString()
    assert codec.decode_request(pb.EngineRequest.FromString(wire)) == request


@pytest.mark.parametrize(
    "wire",
    [
        pb.Constraint(),
        pb.Constraint(phases=[pb.Phase()]),
        pb.Constraint(phases=[pb.Phase(grammar=pb.GrammarPhase())]),
        pb.Constraint(phases=[pb.Phase(free=pb.FreePhase())], loop_to=3),
    ],
)
def test_a_constraint_that_means_nothing_is_refused(wire: pb.Constraint):
    """A phase of a later version has no known kind: it is not skipped."""
    with pytest.raises(errors.InvalidRequest, match="constraint"):
        codec.decode_request(pb.EngineRequest(constraint=wire))


@pytest.mark.parametrize(
    ("span", "problem"),
    [
        (pb.MediaSpan(first=1, identity=b"i" * 16), "a span of 0 tokens"),
        (pb.MediaSpan(num_tokens=1, identity=b"i" * 15), "an identity has 16 bytes"),
        (pb.MediaSpan(num_tokens=4, identity=b"i" * 16, grid_height=2), "a grid of 2 x 0 is empty"),
        (pb.MediaSpan(num_tokens=4, identity=b"i" * 16, grid_height=3, grid_width=2), "a grid of 3 x 2"),
        (pb.MediaSpan(num_tokens=4, identity=b"i" * 16, grid_height=2, grid_width=2, first_row=1), "a grid of 2 x 2"),
    ],
)
def test_a_media_span_that_means_nothing_is_refused(span: pb.MediaSpan, problem: str):
    with pytest.raises(errors.InvalidRequest, match=f"media: {problem}"):
        codec.decode_request(pb.EngineRequest(media=[span]))


def test_too_many_media_spans_are_refused():
    span = pb.MediaSpan(num_tokens=1, identity=b"i" * 16)
    with pytest.raises(errors.InvalidRequest, match="media has 4097 spans"):
        codec.decode_request(pb.EngineRequest(media=[span] * (MAX_SPANS + 1)))


@given(tokens)
def test_tokens_survive_the_wire(token):
    wire = codec.encode_token(token).SerializeToString()
    assert codec.decode_token(pb.OutputToken.FromString(wire)) == token


@given(doubles)
def test_rounding_is_that_of_single_precision(value):
    assert codec.to_float32(value) == float(np.float32(value))
    assert codec.to_float32(codec.to_float32(value)) == codec.to_float32(value)


def over_the_wire(sampling: SamplingParams) -> SamplingParams:
    wire = codec.encode_sampling(sampling).SerializeToString()
    return codec.decode_sampling(pb.SamplingParams.FromString(wire))


@given(samplings(doubles))
def test_encoding_twice_changes_no_sampling_parameter(sampling):
    """Values rounded for one worker are exact for the next."""
    first = over_the_wire(sampling)
    assert over_the_wire(first) == first
    assert first.temperature == float(np.float32(sampling.temperature))
    assert first.logit_bias == tuple(sorted(first.logit_bias))


def test_a_float_beyond_single_precision_is_refused():
    with pytest.raises(OverflowError):
        codec.to_float32(1e300)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_survive(reason):
    assert codec.decode_finish(codec.encode_finish(reason)) is reason


def leaves(kind: type[errors.BatonError]) -> list[type[errors.BatonError]]:
    below = [leaf for child in kind.__subclasses__() for leaf in leaves(child)]
    return [kind, *below]


DOMAIN_ERRORS = [kind for kind in leaves(errors.BatonError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", DOMAIN_ERRORS)
def test_failures_keep_class_and_message(kind):
    back = codec.decode_failure(codec.encode_failure(kind("what happened")))
    assert type(back) is kind
    assert str(back) == "what happened"


@pytest.mark.parametrize("kind", DOMAIN_ERRORS)
def test_statuses_keep_class_and_message(kind):
    trailing = Metadata((codec.CODE_METADATA_KEY, kind.code))
    failed = AioRpcError(codec.grpc_status(kind("x")), Metadata(), trailing, details="what happened")
    back = codec.error_from_rpc(failed)
    assert type(back) is kind
    assert str(back) == "what happened"


@given(ids)
def test_a_superseded_failure_carries_the_newest_attempt(seen: AttemptId):
    back = codec.decode_failure(codec.encode_failure(errors.Superseded("late", seen)))
    assert isinstance(back, errors.Superseded)
    assert back.seen == seen


def test_a_superseded_failure_of_an_older_peer_carries_no_attempt():
    back = codec.decode_failure(pb.Failure(code="superseded", message="late"))
    assert isinstance(back, errors.Superseded)
    assert back.seen is None


def test_refusal_overload_and_loss_have_different_statuses():
    assert codec.grpc_status(errors.ContextOverflow("x")) is grpc.StatusCode.INVALID_ARGUMENT
    assert codec.grpc_status(errors.Overloaded("x")) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert codec.grpc_status(errors.Superseded("x")) is grpc.StatusCode.FAILED_PRECONDITION
    assert codec.grpc_status(errors.WorkerLost("x")) is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("kind", [errors.Overloaded, errors.Draining, errors.NoWorkers])
@pytest.mark.parametrize("retry_after_s", [None, 0.0, 0.25, 12.5])
def test_a_refusal_keeps_when_to_try_again(kind, retry_after_s: float | None):
    back = codec.error_from_rpc(codec.rpc_error(kind("no room", retry_after_s=retry_after_s)))
    assert isinstance(back, errors.Refused)
    assert type(back) is kind
    assert back.retry_after_s == retry_after_s


@pytest.mark.parametrize(
    ("told", "read"),
    [("inf", codec.MAX_RETRY_AFTER_S), ("1e9", codec.MAX_RETRY_AFTER_S), ("nan", None), ("-1", None), ("soon", None)],
)
def test_the_time_of_a_peer_is_bounded_and_nonsense_is_none(told: str, read: float | None):
    trailing = Metadata((codec.RETRY_METADATA_KEY, told), (codec.CODE_METADATA_KEY, "overloaded"))
    back = codec.error_from_rpc(AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, Metadata(), trailing, details="x"))
    assert isinstance(back, errors.Overloaded)
    assert back.retry_after_s == read


def test_an_error_that_is_no_refusal_has_no_time():
    trailing = Metadata((codec.RETRY_METADATA_KEY, "1"), (codec.CODE_METADATA_KEY, "worker_lost"))
    back = codec.error_from_rpc(AioRpcError(grpc.StatusCode.ABORTED, Metadata(), trailing, details="x"))
    assert type(back) is errors.WorkerLost


def test_a_status_without_our_code_is_worker_lost():
    failed = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details="connection refused")
    back = codec.error_from_rpc(failed)
    assert type(back) is errors.WorkerLost
    assert back.detail == "UNAVAILABLE: connection refused"
    assert back.log_text == f"{back} (UNAVAILABLE: connection refused)"


DETAILS = (
    "",
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50052: Failed to connect to remote host",
    "DNS resolution failed for prefill-0.internal:50052: C-ares status is not ARES_SUCCESS",
)


@pytest.mark.parametrize("status", grpc.StatusCode)
@pytest.mark.parametrize("details", DETAILS)
def test_messages_of_failed_calls_have_no_text_of_grpc(status: grpc.StatusCode, details: str):
    """Also after another process has passed the error on."""
    back = codec.error_from_rpc(AioRpcError(status, Metadata(), Metadata(), details=details))
    for error in (back, codec.decode_failure(codec.encode_failure(back))):
        for leak in (status.name, "grpc", "ipv4:", "10.0.0.7", "50052", "prefill-0", "details", "last error", "DNS"):
            assert leak not in str(error)


@pytest.mark.parametrize("verdict", [None, *errors.PageVerdict])
def test_a_verdict_survives_the_wire(verdict: errors.PageVerdict | None):
    error = codec.decode_failure(codec.encode_failure(errors.IntegrityFailure("wrong", verdict)))
    assert isinstance(error, errors.IntegrityFailure)
    assert error.verdict is verdict
