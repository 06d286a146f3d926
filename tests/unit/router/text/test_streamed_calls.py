"""Constrained calls come while they are written: joined they are the whole calls, for every cut of every format."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.services.router.text.parsers.argument_stream import ConstrainedCalls
from baton.services.router.text.parsers.base import OutputParser, ParsedPiece, joined_calls
from baton.services.router.text.parsers.harmony import MARKERS, HarmonyParser
from baton.services.router.text.parsers.registry import HARMONY, TOOL_FORMATS
from tests.unit.router.text.test_tool_formats import AT_HEAD, CALLS, SCHEMAS, WRITERS, Arguments, cut, mutated

WRITTEN = {"qwen3_coder", "glm", "pythonic"}
"""Formats whose arguments are no JSON: their calls come whole."""
JSON_FORMATS = sorted(WRITERS.keys() - WRITTEN)
TRIGGERED = [name for name in JSON_FORMATS if TOOL_FORMATS[name].trigger]
ALL, AFTER_MARKER, NONE = ConstrainedCalls.ALL, ConstrainedCalls.AFTER_MARKER, ConstrainedCalls.NONE
DEEP = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(alphabet='ab{}[]"\\/\n é<>', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
DEEP_CALLS = st.tuples(st.just("now"), st.dictionaries(st.text(alphabet='a}"\\', max_size=3), DEEP, max_size=3))
OUTPUTS = st.lists(CALLS | DEEP_CALLS, min_size=1, max_size=3)


def run(parser: OutputParser, items: Sequence[str], markers: Sequence[str] = ()) -> ParsedPiece:
    """All that comes of the items, its calls joined. Items that are markers come as tokens."""
    found = ParsedPiece()
    for item in items:
        found += parser.push_marker(item) if item in markers else parser.push(item)
    found += parser.finish()
    return ParsedPiece(found.text, joined_calls(found.calls), found.reasoning)


def parse(name: str, items: Sequence[str], markers: Sequence[str] = (), **options: Any) -> ParsedPiece:
    return run(TOOL_FORMATS[name].parser(SCHEMAS, **options), items, markers)


def as_tokens(output: str, markers: Sequence[str], seed: int) -> list[str]:
    """The output cut at random, but not within a marker."""
    parts = re.split("(" + "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) + ")", output)
    return [item for part in parts if part for item in ([part] if part in markers else cut(part, seed))]


@pytest.mark.parametrize("name", JSON_FORMATS)
@settings(max_examples=100)
@given(OUTPUTS, st.sampled_from(["", "so ", "a < b\n"]), st.integers(0, 2**20), st.booleans())
def test_parts_make_the_whole_calls(
    name: str, calls: list[tuple[str, Arguments]], before: str, seed: int, single: bool
) -> None:
    output = ("" if name in AT_HEAD else before) + WRITERS[name](calls)
    whole = parse(name, [output], single=single)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls[: 1 if single else None]
    for pieces in (cut(output, seed), cut(output, seed + 1), [*output], [output]):
        assert parse(name, pieces, single=single, constrained=ALL) == whole
    markers = TOOL_FORMATS[name].markers
    if name in TRIGGERED:
        assert parse(name, as_tokens(output, markers, seed), markers, single=single, constrained=AFTER_MARKER) == whole


@pytest.mark.parametrize("name", JSON_FORMATS)
@settings(max_examples=20)
@given(OUTPUTS)
def test_each_character_of_arguments_comes_at_once(name: str, calls: list[tuple[str, Arguments]]) -> None:
    """Also in the middle of a call that is cut there: what was shown stays, and is no text."""
    output = WRITERS[name](calls)
    parser, begun = TOOL_FORMATS[name].parser(SCHEMAS, constrained=ALL), ParsedPiece()
    for size, char in enumerate(output, 1):
        begun += parser.push(char)
        shown = joined_calls(begun.calls)
        assert all(part.arguments for part in begun.calls)
        if shown and not parser.in_block:
            continue
        if shown and (last := shown[-1].arguments) and not _is_json(last):
            assert output[:size].endswith(last)
            assert parse(name, [output[:size]], constrained=ALL) == ParsedPiece("", shown)
    assert [(call.name, json.loads(call.arguments)) for call in joined_calls(begun.calls)] == calls
    assert len(begun.calls) == sum(len(call.arguments) for call in joined_calls(begun.calls))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("constrained", [ALL, AFTER_MARKER])
@settings(max_examples=60)
@given(st.lists(CALLS, max_size=2), st.sampled_from(["", "so "]), st.integers(0, 2**20), st.booleans())
def test_every_cut_of_an_output_that_breaks_its_constraint_gives_the_same(
    name: str,
    constrained: ConstrainedCalls,
    calls: list[tuple[str, Arguments]],
    after: str,
    seed: int,
    single: bool,
) -> None:
    """No worker sends such a one; the answer is the same to all who read it, all the same."""
    output, markers = mutated(name, calls, seed) + after, TOOL_FORMATS[name].markers
    runs = [
        parse(name, as_tokens(output, markers, seed + n), markers, single=single, constrained=constrained)
        for n in range(3)
    ]
    assert runs[0] == runs[1] == runs[2]
    assert {call.name for call in runs[0].calls} <= SCHEMAS.keys()
    left = iter(output)
    assert all(char in left for char in runs[0].text), "text is a part of the output, in its order"


@pytest.mark.parametrize("name", TRIGGERED)
@settings(max_examples=60)
@given(st.lists(CALLS, max_size=2), st.integers(0, 2**20))
def test_a_marker_that_is_written_as_text_begins_no_certain_call(
    name: str, calls: list[tuple[str, Arguments]], seed: int
) -> None:
    """The constraint begins with the token only, so such a block may still be none: it comes whole, or is text."""
    output = mutated(name, calls, seed)
    for pieces in ([output], cut(output, seed)):
        assert parse(name, pieces, constrained=AFTER_MARKER) == parse(name, [output])


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_a_call_that_is_cut_keeps_what_was_shown(name: str) -> None:
    whole = WRITERS[name]([("say", {"text": "hello", "on": True})])
    at = whole.index("hello") + 2
    for calls_only in (False, True):
        found = parse(name, cut(whole[:at], 1), constrained=ALL, calls_only=calls_only)
        assert [(call.name, call.arguments) for call in found.calls] == [("say", '{"text": "he')]
        assert not found.text


def test_a_long_call_has_no_bound_where_it_is_certain() -> None:
    output = WRITERS["hermes"]([("say", {"text": "x" * 200_000, "on": True})])
    [call] = parse("hermes", [output[at : at + 50] for at in range(0, len(output), 50)], constrained=ALL).calls
    assert json.loads(call.arguments)["text"] == "x" * 200_000


@given(OUTPUTS, st.integers(0, 2**20), st.booleans())
def test_parts_of_harmony_make_the_whole_calls(calls: list[tuple[str, Arguments]], seed: int, single: bool) -> None:
    assert HARMONY not in WRITERS
    items: list[str] = []
    for name, arguments in calls:
        head = ["<|start|>", f"assistant<|channel|>commentary to=functions.{name} ", "<|constrain|>", "json"]
        items += [*head, "<|message|>", *cut(json.dumps(arguments), seed), "<|call|>"]

    def parser(constrained: ConstrainedCalls) -> HarmonyParser:
        return HarmonyParser(SCHEMAS, single=single, calls_only=True, constrained=constrained)

    whole = run(parser(NONE), items, MARKERS)
    assert run(parser(ALL), items, MARKERS) == whole
    assert len(whole.calls) == (1 if single else len(calls))
    size = random.Random(seed).randrange(len(items))
    begun = run(parser(ALL), items[:size], MARKERS)
    for part, call in zip(begun.calls, whole.calls, strict=False):
        assert call.arguments.startswith(part.arguments)
