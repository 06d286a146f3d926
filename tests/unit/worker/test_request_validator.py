"""Validation of messages by a worker. tests/fuzz covers garbage sent to whole workers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.domain.errors import ContextOverflow, InvalidRequest
from baton.domain.ids import AttemptId, RequestId
from baton.domain.media.span import MediaGrid, MediaRules, MediaSpan
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


IMAGE = b"i" * 16
WITH_IMAGES = replace(VALIDATOR, media=MediaRules(frozenset({1, 2})))
IN_BLOCKS = replace(VALIDATOR, media=MediaRules(frozenset({1, 2}), block_rows=1))
WITH_GRIDS = replace(VALIDATOR, media=MediaRules(frozenset({1, 2}), has_grid=True))


def validate_media(validator: EngineRequestValidator, *media: MediaSpan) -> EngineRequest:
    """Validates the prompt 0 1 2 3, behind which an earlier attempt put out 1."""
    sent = replace(request(), tokens=(0, 1, 2, 3, 1), media=media)
    return validator.validate_prompt(codec.encode_request(sent))


def test_spans_that_cover_the_placeholders_pass():
    """An output token is not looked at: the model may put out the id of a placeholder."""
    whole = MediaSpan(1, 2, IMAGE)
    apart = MediaSpan(1, 1, IMAGE), MediaSpan(2, 1, IMAGE, first_row=1)
    assert validate_media(WITH_IMAGES, whole).media == (whole,)
    assert validate_media(WITH_IMAGES, *apart).media == apart
    assert validate_media(WITH_GRIDS, MediaSpan(1, 2, IMAGE, MediaGrid(1, 2))).num_emitted == 1
    assert validate_media(VALIDATOR).media == ()


@pytest.mark.parametrize(
    ("validator", "media", "problem"),
    [
        (VALIDATOR, [MediaSpan(1, 2, IMAGE)], "is not served by this worker, only text is"),
        (WITH_IMAGES, [], "has no span for the placeholder at 1"),
        (WITH_IMAGES, [MediaSpan(1, 1, IMAGE)], "has no span for the placeholder at 2"),
        (WITH_IMAGES, [MediaSpan(2, 1, IMAGE)], "has no span for the placeholder at 1"),
        (WITH_IMAGES, [MediaSpan(0, 3, IMAGE)], "has a span at 0 over tokens that are no placeholders"),
        (WITH_IMAGES, [MediaSpan(1, 3, IMAGE)], "has a span at 1 over tokens that are no placeholders"),
        (WITH_IMAGES, [MediaSpan(1, 9, IMAGE)], "has a span at 1 that is out of order or not within the 4 prompt"),
        (WITH_IMAGES, [MediaSpan(2, 1, IMAGE), MediaSpan(1, 1, IMAGE)], "has no span for the placeholder at 1"),
        (WITH_IMAGES, [MediaSpan(1, 2, IMAGE), MediaSpan(2, 1, IMAGE)], "has a span at 2 that is out of order"),
        (WITH_IMAGES, [MediaSpan(1, 2, IMAGE, MediaGrid(1, 2))], "has a grid, which this model has not"),
        (WITH_GRIDS, [MediaSpan(1, 2, IMAGE)], "needs a grid for every span here"),
        (IN_BLOCKS, [MediaSpan(1, 2, IMAGE)], "has a span at 1 that is no whole item of 1 rows"),
        (IN_BLOCKS, [MediaSpan(1, 1, IMAGE, first_row=1)], "has a span at 1 that is no whole item of 1 rows"),
        (IN_BLOCKS, [MediaSpan(1, 1, IMAGE), MediaSpan(2, 1, IMAGE)], "has a span at 2 with no token between"),
    ],
)
def test_other_spans_are_refused_by_name(validator: EngineRequestValidator, media: list[MediaSpan], problem: str):
    with pytest.raises(InvalidRequest, match=f"media {problem}") as caught:
        validate_media(validator, *media)
    assert caught.value.param == "media"
