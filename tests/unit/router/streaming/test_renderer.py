"""The renderer's lines equal those that the builder makes, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from baton.domain.request import FinishReason, OutputToken, StopParams, TokenLogprobs
from baton.services.router.generation import TokenChunk
from baton.services.router.openai.chat import ChatResponseBuilder
from baton.services.router.openai.completions import CompletionResponseBuilder
from baton.services.router.openai.response_builder import ResponseBuilder
from baton.services.router.openai.schemas import PromptTokensDetails, Usage
from baton.services.router.openai.valid_request import StreamOptions, ValidRequest
from baton.services.router.streaming.renderer import SAMPLE_TEXT, EventRenderer
from baton.services.router.text.choice_text import ChoiceText, TokenEvent
from baton.services.router.text.parsers.base import ToolCall
from tests.unit.router.streaming.chunk_sources import request
from tests.unit.router.text.text_models import bundled

NUM_CHOICES = 2
BUILDERS = (ChatResponseBuilder, CompletionResponseBuilder)
USAGE = Usage(2, 1, 3, PromptTokensDetails(0))

TOKEN = st.builds(
    OutputToken,
    st.integers(0, 9),
    st.integers(0, 1999),
    st.one_of(st.none(), st.none(), st.builds(TokenLogprobs, st.floats(-9, 0), st.just(((7, -1.0),)))),
)
CALLS = st.sampled_from([(), (), (), (ToolCall(0, "f", "{}"),)])
FINISHES = st.sampled_from([None, None, None, *FinishReason])
TEXT = st.one_of(st.text(), st.text('"\\\n\x00\x1f/<>&é🦊\u2028\ue000'), st.just(SAMPLE_TEXT))
EVENT = st.builds(
    TokenEvent,
    st.integers(0, NUM_CHOICES - 1),
    st.one_of(TOKEN, st.none()),
    TEXT,
    st.just(0),
    FINISHES,
    st.none(),
    CALLS,
    st.sampled_from(["", "", "because"]),
)
REQUESTS = st.builds(
    lambda usage, ids, echo, as_ids: request(
        NUM_CHOICES,
        stream_options=StreamOptions(usage),
        return_token_ids=ids,
        echoes=(echo, echo),
        tokens_as_ids=as_ids,
    ),
    st.booleans(),
    st.booleans(),
    st.text('a"é', max_size=3),
    st.booleans(),
)


def check_lines(
    make: Callable[..., ResponseBuilder], valid: ValidRequest, events: list[tuple[TokenEvent, Usage | None]]
) -> None:
    renderer, plain = EventRenderer(make(valid, bundled(), "f"), valid), make(valid, bundled(), "f")
    assert valid.stream_options is not None
    none = None if valid.stream_options.include_usage else UNSET
    for event, usage in events:
        assert renderer.line(event, usage) == b"data: %b\n\n" % plain.chunk(event, none if usage is None else usage)


@settings(deadline=None)
@given(st.sampled_from(BUILDERS), REQUESTS, st.lists(st.tuples(EVENT, st.sampled_from([None, None, USAGE]))))
def test_any_events_have_the_lines_of_the_builder(make: Any, valid: ValidRequest, events: Any) -> None:
    check_lines(make, valid, events)


@settings(deadline=None)
@given(
    st.sampled_from(BUILDERS),
    st.lists(st.integers(0, 1999), min_size=1),
    st.lists(st.text("ab é🦊", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_answers_of_any_tokens_have_the_lines_of_the_builder(
    make: Any, tokens: list[int], stops: list[str], include_stop: bool
) -> None:
    """Characters are cut between tokens, and text is held back for stop strings."""
    detokenizer, stop = bundled().detokenizer(skip_special_tokens=True), StopParams(100)
    text = ChoiceText(0, stop, detokenizer, stops, include_stop=include_stop)
    outputs = tuple(OutputToken(index, token) for index, token in enumerate(tokens))
    events = text.events(TokenChunk(outputs, 0, FinishReason.LENGTH))
    valid = replace(request(1), stop_strings=tuple(stops), echoes=("",), include_stop=include_stop)
    check_lines(make, valid, [(event, None) for event in events])


class CountingBuilder(ChatResponseBuilder):
    num_chunks = 0

    def chunk(self, *inputs: Any) -> bytes:
        self.num_chunks += 1
        return super().chunk(*inputs)


@pytest.mark.parametrize("model", ["m", SAMPLE_TEXT])
def test_most_events_are_not_built_unless_the_sample_is_ambiguous(model: str) -> None:
    valid = request(1, model=model)
    builder, plain = CountingBuilder(valid, bundled(), "f"), ChatResponseBuilder(valid, bundled(), "f")
    renderer = EventRenderer(builder, valid)
    events = [TokenEvent(0, OutputToken(index, 7), f"text {index}", 0) for index in range(10)]
    assert [renderer.line(event) for event in events] == [b"data: %b\n\n" % plain.chunk(e, UNSET) for e in events]
    assert builder.num_chunks == (3 if model == "m" else 11)  # the first two events, and the sample
