"""Validation of messages by a worker. tests/fuzz covers garbage sent to whole workers."""

from __future__ import annotations

import math

import pytest

from baton.domain.errors import ContextOverflow, InvalidRequest
from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.rpc import codec
from baton.rpc.gen import common_pb2
from baton.worker.request_validator import (
    MAX_DURATION_S,
    MAX_NAME_CHARS,
    EngineRequestValidator,
    clamp_duration,
    validate_id,
)

VALIDATOR = EngineRequestValidator(vocab_size=100, max_model_len=10)
SAMPLING = SamplingParams(top_k=5, top_p=0.5, logit_bias=((99, -1.0),), logprobs=100)


def request(num_tokens: int = 4, max_tokens: int = 6) -> EngineRequest:
    stop = StopParams(max_tokens, stop_token_ids=frozenset({99}))
    return EngineRequest(AttemptId(RequestId("r"), 1), tuple(range(num_tokens)), num_tokens, SAMPLING, stop, "salt")


def test_a_good_request_passes_unchanged():
    assert VALIDATOR.validate_sequence(codec.encode_request(request())) == request()
    assert VALIDATOR.validate_prompt(codec.encode_request(request(max_tokens=1000))) == request(max_tokens=1000)


def test_a_sequence_that_cannot_fit_is_a_context_overflow():
    with pytest.raises(ContextOverflow, match="11 tokens"):
        VALIDATOR.validate_sequence(codec.encode_request(request(max_tokens=7)))
    with pytest.raises(ContextOverflow, match="11 tokens"):
        VALIDATOR.validate_prompt(codec.encode_request(request(num_tokens=11)))


@pytest.mark.parametrize(
    ("sent", "read"),
    [(1.5, 1.5), (0.0, 0.0), (-3.0, 0.0), (-math.inf, 0.0), (math.inf, MAX_DURATION_S), (1e300, MAX_DURATION_S)],
)
def test_durations_are_clamped_to_one_day(sent: float, read: float):
    assert clamp_duration(sent, "deadline_s") == read


def test_a_nan_duration_is_refused():
    with pytest.raises(InvalidRequest, match="deadline_s is no number"):
        clamp_duration(math.nan, "deadline_s")


@pytest.mark.parametrize(("name", "attempt"), [("", 1), ("x" * (MAX_NAME_CHARS + 1), 1), ("r", 0)])
def test_empty_and_oversized_ids_are_refused(name: str, attempt: int):
    with pytest.raises(InvalidRequest):
        validate_id(common_pb2.AttemptId(request_id=name, attempt=attempt))
    assert validate_id(common_pb2.AttemptId(request_id="x" * MAX_NAME_CHARS, attempt=1)).attempt == 1
