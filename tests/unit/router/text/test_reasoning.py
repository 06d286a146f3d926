"""Reasoning in text: every cut gives the same, and text, reasoning and calls are what an independent reading finds."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.request import FinishReason, OutputToken, StopParams
from baton.services.router.generation import TokenChunk
from baton.services.router.text.choice_text import ChoiceText, TokenEvent
from baton.services.router.text.parsers.base import AnswerParser, OutputParser, ParsedPiece, TextParser, ToolCall
from baton.services.router.text.parsers.reasoning import ReasoningParser, ReasoningStart
from baton.services.router.text.parsers.registry import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS, reasoning_format
from tests.unit.router.text.text_models import marked

THINK = REASONING_FORMATS["think"]
OPEN, CLOSE = THINK.opening, THINK.closing
MARKERS = frozenset({OPEN, CLOSE})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "</think>"}}\n</tool_call>'
PARTS = st.sampled_from([OPEN, CLOSE, "<thi", "</", "</think", "\n", "  ", "     ", "so", "a < b", CALL, "<tool_call>"])
OUTPUTS = st.lists(st.one_of(PARTS, st.text(alphabet="<>/think \n", max_size=9)), max_size=8)
STARTS = st.sampled_from(ReasoningStart)


def hermes() -> OutputParser:
    return TOOL_FORMATS["hermes"].parser({"add": {}})


def parse(pieces: Sequence[str], start: ReasoningStart, answer: OutputParser, *, tokens: bool) -> ParsedPiece:
    """Pieces that are markers come as tokens, if `tokens`."""
    parser = ReasoningParser(THINK, start, answer, MARKERS if tokens else frozenset())
    found = ParsedPiece()
    for piece in pieces:
        found += parser.push_marker(piece) if tokens and piece in MARKERS else parser.push(piece)
    return found + parser.finish()


def cut(pieces: Sequence[str], seed: int, *, tokens: bool) -> list[str]:
    """The same output in other pieces; a token stays whole."""
    draw, found = random.Random(seed), list[str]()
    text = "".join(piece if not tokens or piece not in MARKERS else f"\0{piece}\0" for piece in pieces)
    for part in text.split("\0"):
        rest = part
        while rest and not (tokens and rest in MARKERS):
            size = draw.randint(1, draw.choice([1, 3, 20]))
            found.append(rest[:size])
            rest = rest[size:]
        found += [rest] if rest else []
    return found


def read_whole(output: str, start: ReasoningStart) -> tuple[str, str]:
    """Reasoning and answer, read from the whole text."""
    begun = re.match(rf"\s{{0,4096}}{OPEN}", output) if start is ReasoningStart.POSSIBLE else None
    if start is ReasoningStart.CLOSED or (start is ReasoningStart.POSSIBLE and not begun):
        return "", output
    reasoning, closing, answer = output[begun.end() if begun else 0 :].partition(CLOSE)
    return reasoning, re.sub(r"\A\s{0,4}", "", answer) if closing else ""


@given(OUTPUTS, STARTS, st.integers(0, 2**20), st.booleans())
def test_every_cut_of_an_output_gives_the_same(
    pieces: list[str], start: ReasoningStart, seed: int, tokens: bool
) -> None:
    whole = parse(pieces, start, hermes(), tokens=tokens)
    assert parse(cut(pieces, seed, tokens=tokens), start, hermes(), tokens=tokens) == whole


@given(OUTPUTS, STARTS)
def test_reasoning_and_answer_are_those_of_the_whole_text(pieces: list[str], start: ReasoningStart) -> None:
    output = "".join(pieces)
    reasoning, answer = read_whole(output, start)
    assert parse(pieces, start, TextParser(), tokens=False) == ParsedPiece(answer, (), reasoning)
    parser = hermes()
    expected = parser.push(answer) + parser.finish()
    found = parse(pieces, start, hermes(), tokens=False)
    assert (found.text, found.calls, found.reasoning) == (expected.text, expected.calls, reasoning)


@given(OUTPUTS, STARTS)
def test_text_that_looks_like_a_marker_token_is_text(pieces: list[str], start: ReasoningStart) -> None:
    output = "".join(pieces)
    shown = parse([*output], start, TextParser(), tokens=True)
    expected = ParsedPiece(reasoning=output) if start is ReasoningStart.OPEN else ParsedPiece(output)
    assert shown == expected


def test_a_stray_end_is_dropped_from_text_and_kept_in_a_call() -> None:
    pieces = ["so ", CLOSE, "it is ", '<tool_call>{"name": "add", "arguments": {"a": "', CLOSE, '"}}']
    found = parse(pieces, ReasoningStart.POSSIBLE, hermes(), tokens=True)
    assert found == ParsedPiece("so it is", (ToolCall(0, "add", '{"a": "</think>"}'),))


def test_whitespace_before_a_form_is_part_of_it() -> None:
    parser = ReasoningParser(THINK, ReasoningStart.OPEN, TextParser(), MARKERS, keep_space=True)
    assert parser.push("x") + parser.push_marker(CLOSE) + parser.push("\n [1]") == ParsedPiece("\n [1]", (), "x")


@pytest.mark.parametrize(
    ("prompt", "continued", "start"),
    [
        ("<user>hi</user><assistant><think>\n", None, ReasoningStart.OPEN),
        ("<assistant><think>\n\n</think>\n\n", None, ReasoningStart.CLOSED),
        ("<user>what is <think>?</user><assistant>", None, ReasoningStart.POSSIBLE),
        ("<assistant>so", "so", ReasoningStart.CLOSED),
        ("<assistant><think>so", "<think>so", ReasoningStart.OPEN),
        ("<assistant><think>so</think>it", "<think>so</think>it", ReasoningStart.CLOSED),
    ],
)
def test_the_prompt_says_how_an_output_begins(prompt: str, continued: str | None, start: ReasoningStart) -> None:
    assert THINK.start_after(prompt, continued) is start


def test_the_format_is_that_of_the_template_or_the_setting() -> None:
    assert reasoning_format(AUTO, "x </think> y") is THINK
    assert reasoning_format(AUTO, "[THINK]") is REASONING_FORMATS["mistral"]
    assert reasoning_format(AUTO, "plain") is None
    assert reasoning_format("think", "plain") is THINK
    assert reasoning_format(NONE, "<think>") is None
    with pytest.raises(KeyError):
        reasoning_format("thoughts", "plain")


MODEL = marked("", [OPEN, CLOSE], special=True)


def events(text: str, bundles: Sequence[int]) -> list[TokenEvent]:
    """Events of a choice whose tokens come in bundles of these sizes, then one by one."""
    ids = MODEL.encode(text, add_special_tokens=False)
    tokens = [OutputToken(index, token) for index, token in enumerate([*ids, 2])]
    stop = StopParams(1000, stop_token_ids=frozenset({2}))
    markers = {MODEL.encode(marker, add_special_tokens=False)[0]: marker for marker in MARKERS}
    parser = ReasoningParser(THINK, ReasoningStart.POSSIBLE, hermes(), MARKERS)
    detokenizer = MODEL.detokenizer(skip_special_tokens=True)
    choice, found = ChoiceText(0, stop, detokenizer, ["more"], parser=AnswerParser(parser, markers)), list[TokenEvent]()
    for size in (*bundles, *[1] * len(tokens)):
        bundle, tokens = tuple(tokens[:size]), tokens[size:]
        if bundle and not (found and found[-1].finish):
            found += choice.events(TokenChunk(bundle, 0, None if tokens else FinishReason.STOP))
    return found


@given(st.lists(st.integers(1, 8), max_size=30))
def test_every_token_has_its_event_however_tokens_come(bundles: list[int]) -> None:
    """Special tokens are no text, and yet markers; a stop string in a thought ends nothing."""
    thought = "No more é🦊?"
    found = events(f"{OPEN}{thought}{CLOSE}\n\nWell: {CALL} and more.", bundles)
    assert found == events(f"{OPEN}{thought}{CLOSE}\n\nWell: {CALL} and more.", [])
    assert [event.token.index for event in found if event.token is not None] == list(range(len(found)))
    assert "".join(event.reasoning for event in found) == thought
    assert "".join(event.text for event in found) == "Well: and "
    num_reasoning = len(MODEL.encode(f"{OPEN}{thought}{CLOSE}", add_special_tokens=False))
    assert [event.is_reasoning for event in found] == [index < num_reasoning for index in range(len(found))]
    assert found[-1].stop == 0
