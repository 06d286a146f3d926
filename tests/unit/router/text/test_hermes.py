"""Tool calls in text: every cut gives the same, nothing is lost or shown twice, and only whole calls are calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.request import FinishReason, OutputToken, StopParams
from baton.services.router.generation import TokenChunk
from baton.services.router.text.choice_text import ChoiceText, TokenEvent
from baton.services.router.text.parsers import blocks
from baton.services.router.text.parsers.base import AnswerParser, OutputParser, ToolCall, call_id
from baton.services.router.text.parsers.registry import TOOL_FORMATS
from tests.unit.router.text.text_models import bundled

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAMES = {"add", "get_weather"}
ARGUMENTS = ["{}", '{"a": 1}', '{ "city":"Par}is\\"" , "deep": [{"x": {}}] }', '{"text": "</tool_call><tool_call>"}']
TEXTS = ["", "hello", " a < b ", "<tool", "\n", "{}", "</tool_call>", "tail <tool_call"]
BROKEN = [
    f"{OPEN}no json{CLOSE}",
    f'{OPEN}{{"name": "unknown", "arguments": {{}}}}{CLOSE}',
    f'{OPEN}{{"name": "add", "arguments": [1]}}{CLOSE}',
    f'{OPEN}{{"name": "add", "arguments": {{"a": }}}}{CLOSE}',
    f'{OPEN}{{"arguments": {{}}}}{CLOSE}',
    f"{OPEN}{CLOSE}",
    f"{OPEN}[]{CLOSE}",
]


def hermes(**options: Any) -> OutputParser:
    return TOOL_FORMATS["hermes"].parser({key: {} for key in NAMES}, **options)


def call_text(name: str, arguments: str, space: str = "\n") -> str:
    return f'{OPEN}{space}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{space}{CLOSE}'


def parse(pieces: Sequence[str], **options: Any) -> tuple[str, list[ToolCall]]:
    parser = hermes(**options)
    parsed = [*map(parser.push, pieces), parser.finish()]
    return "".join(piece.text for piece in parsed), [call for piece in parsed for call in piece.calls]


def cut(text: str, seed: int) -> list[str]:
    draw, pieces = random.Random(seed), list[str]()
    while text:
        size = draw.randint(1, draw.choice([1, 3, 20]))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


calls = st.builds(
    call_text, st.sampled_from(sorted(NAMES)), st.sampled_from(ARGUMENTS), st.sampled_from(["", "\n", " "])
)
outputs = st.lists(st.one_of(calls, st.sampled_from(TEXTS), st.sampled_from(BROKEN), st.text(max_size=8)), max_size=6)


@given(outputs.map("".join), st.integers(0, 2**20), st.booleans(), st.booleans())
def test_every_cut_of_an_output_gives_the_same(output: str, seed: int, single: bool, calls_only: bool) -> None:
    options = {"single": single, "calls_only": calls_only}
    assert parse(cut(output, seed), **options) == parse([output], **options)


@given(st.text(alphabet='<tool_cal>/{}": \nab', max_size=60), st.integers(0, 2**20))
def test_every_cut_of_noise_gives_the_same(output: str, seed: int) -> None:
    assert parse(cut(output, seed)) == parse([output])


@given(st.lists(st.tuples(st.sampled_from(["", "hi ", "a\n"]), st.sampled_from(ARGUMENTS)), min_size=1, max_size=4))
def test_calls_and_text_are_those_that_were_written(parts: list[tuple[str, str]]) -> None:
    output = "".join(text + call_text("add", arguments) for text, arguments in parts)
    text, found = parse([output])
    assert text == "".join(text.rstrip() for text, _ in parts)
    assert [call.arguments for call in found] == [arguments.strip() for _, arguments in parts]
    assert [call.index for call in found] == list(range(len(parts)))
    assert all(isinstance(json.loads(call.arguments), dict) for call in found)


@given(outputs.map("".join))
def test_nothing_is_lost_or_shown_twice(output: str) -> None:
    """Text, and the sources of calls in their order, are parts of the output in its order."""
    text, found = parse([output])
    rest = output
    for call in found:
        assert json.dumps(call.name) in rest
        rest = rest[rest.index(call.arguments) + len(call.arguments) :]
    left = iter(output)
    assert all(char in left for char in text)
    if not found:
        assert text == output


@pytest.mark.parametrize("output", BROKEN)
def test_a_block_that_is_no_call_is_text(output: str) -> None:
    assert parse([f"so {output} then"]) == (f"so {output} then", [])
    text, found = parse([output + call_text("add", "{}")])
    assert (text, [call.name for call in found]) == (output, ["add"])


def test_a_call_ends_where_its_json_ends() -> None:
    text, found = parse([f'{OPEN}{{"name": "add", "arguments": {{}}}} and more {CLOSE}'])
    assert (text, len(found)) == (f" and more {CLOSE}", 1)


def test_a_call_that_was_cut_is_text_or_nothing() -> None:
    output = call_text("add", '{"a": 1')[: -len(CLOSE) - 2]
    assert parse([output]) == (output, [])
    assert parse([output], calls_only=True) == ("", [])


def test_arguments_may_be_absent_or_named_parameters() -> None:
    assert parse([f'{OPEN}{{"name": "add"}}{CLOSE}'])[1] == [ToolCall(0, "add", "{}")]
    assert parse([f'{OPEN}{{"parameters": {{"a": 1}}, "name": "add"}}{CLOSE}'])[1] == [ToolCall(0, "add", '{"a": 1}')]


def test_one_call_may_be_all() -> None:
    parser = hermes(single=True)
    assert parser.push("first " + call_text("add", "{}") + call_text("add", "{}") + "rest").calls == (
        ToolCall(0, "add", "{}"),
    )
    assert parser.is_done
    assert parser.push("more").text == parser.finish().text == ""


def test_a_block_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_CALL_CHARS", 50)
    parser = hermes()
    begun = f'{OPEN}{{"name": "' + "x" * 60
    shown = "".join(parser.push(char).text for char in begun)
    assert shown + parser.finish().text == begun
    assert shown


def test_ids_of_calls_differ_and_stay() -> None:
    ids = {call_id(request, choice, index) for request in "ab" for choice in range(2) for index in range(2)}
    assert len(ids) == 8
    assert call_id("a", 0, 0) in ids
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)
    short = call_id("a", 0, 0, is_short=True)
    assert len(short) == 9
    assert short.isalnum()


def events(text: str, bundles: Sequence[int]) -> list[TokenEvent]:
    """Events of a choice whose tokens come in bundles of these sizes, then one by one."""
    ids = bundled().encode(text, add_special_tokens=False)
    tokens = [OutputToken(index, token) for index, token in enumerate([*ids, 2])]
    stop = StopParams(1000, stop_token_ids=frozenset({2}))
    detokenizer = bundled().detokenizer(skip_special_tokens=True)
    choice, found = (
        ChoiceText(0, stop, detokenizer, ["more"], parser=AnswerParser(hermes())),
        list[TokenEvent](),
    )
    for size in (*bundles, *[1] * len(tokens)):
        bundle, tokens = tuple(tokens[:size]), tokens[size:]
        if bundle and not (found and found[-1].finish):
            found += choice.events(TokenChunk(bundle, 0, None if tokens else FinishReason.STOP))
    return found


@given(st.lists(st.integers(1, 8), max_size=30))
def test_every_token_has_its_event_however_tokens_come(bundles: list[int]) -> None:
    """So an event's number names a token, and a client resumes in the middle of a call."""
    text = f"so {call_text('add', ARGUMENTS[2])} {call_text('nobody', '{}')} and more"
    found = events(text, bundles)
    assert found == events(text, [])
    assert [event.token.index for event in found if event.token is not None] == list(range(len(found)))
    assert sum(len(event.calls) for event in found) == 1
    assert found[-1].stop == 0
