"""Messages of gpt-oss: only tokens are markers, every cut gives the same, and calls are whole or text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.services.router.text.parsers import blocks, harmony
from baton.services.router.text.parsers.base import ParsedPiece, ToolCall
from baton.services.router.text.parsers.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MARKERS,
    MESSAGE,
    RETURN,
    START,
    HarmonyParser,
)

NAMES = {"add", "now"}
ANALYSIS = [CHANNEL, "analysis", MESSAGE, "Hm <|end|> é", END]
FINAL = [START, "assistant", CHANNEL, "final", MESSAGE, "It is 3.", RETURN]
ADD = [START, "assistant", CHANNEL, "commentary to=functions.add ", CONSTRAIN, "json", MESSAGE, '{"a": 1}', CALL]
OLDER = [START, "assistant to=functions.add", CHANNEL, "commentary json", MESSAGE, '{"a": 1}', CALL]
UNKNOWN = [CHANNEL, "commentary to=functions.nobody", MESSAGE, '{"a": 1}', CALL]
PREAMBLE = [START, "assistant", CHANNEL, "commentary", MESSAGE, "I will add.", END]
PARTS = st.sampled_from([ANALYSIS, FINAL, ADD, OLDER, UNKNOWN, PREAMBLE])
OUTPUTS = st.lists(
    st.one_of(PARTS, st.lists(st.sampled_from([*MARKERS, "so", " to=add", "{}", "[1]"]), max_size=4)), max_size=5
)


def parse(items: Sequence[str], *, single: bool = False, calls_only: bool = False) -> ParsedPiece:
    """Items that are markers come as tokens."""
    parser, found = HarmonyParser(NAMES, single=single, calls_only=calls_only), ParsedPiece()
    for item in items:
        found += parser.push_marker(item) if item in MARKERS else parser.push(item)
    return found + parser.finish()


def cut(items: Sequence[str], seed: int) -> list[str]:
    draw, found = random.Random(seed), list[str]()
    for item in items:
        rest = item
        while rest and item not in MARKERS:
            size = draw.randint(1, draw.choice([1, 3, 20]))
            found.append(rest[:size])
            rest = rest[size:]
        found += [item] if item in MARKERS else []
    return found


@given(OUTPUTS, st.integers(0, 2**20), st.booleans(), st.booleans())
def test_every_cut_of_an_output_gives_the_same(
    parts: list[list[str]], seed: int, single: bool, calls_only: bool
) -> None:
    items = [item for part in parts for item in part]
    found = parse(items, single=single, calls_only=calls_only)
    assert parse(cut(items, seed), single=single, calls_only=calls_only) == found
    left = iter("".join(items))
    assert all(char in left for char in found.text), "text is a part of the output, in its order"
    assert all(call.name in NAMES and isinstance(json.loads(call.arguments), dict) for call in found.calls)
    assert not (calls_only and found.text)
    assert not (single and len(found.calls) > 1)


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ([*ANALYSIS, *FINAL], ParsedPiece("It is 3.", (), "Hm <|end|> é")),
        ([*ANALYSIS, *ADD], ParsedPiece("", (ToolCall(0, "add", '{"a": 1}'),), "Hm <|end|> é")),
        ([*ANALYSIS, *OLDER], ParsedPiece("", (ToolCall(0, "add", '{"a": 1}'),), "Hm <|end|> é")),
        ([*PREAMBLE, *ADD[:-1]], ParsedPiece("I will add.", (ToolCall(0, "add", '{"a": 1}'),))),
        ([*ADD[:-2], CALL], ParsedPiece("", (ToolCall(0, "add", "{}"),))),
        (UNKNOWN, ParsedPiece("".join(UNKNOWN[:-1]))),
        ([*ADD[:-2], '{"a": ', END], ParsedPiece("".join(ADD[:-2]) + '{"a": ')),
        ([*ANALYSIS, START, "assistant", CHANNEL, "final"], ParsedPiece("", (), "Hm <|end|> é")),
        (["no header at all"], ParsedPiece("no header at all")),
        (
            [CHANNEL, "final", MESSAGE, "<|channel|>analysis", MESSAGE, "x"],
            ParsedPiece(f"<|channel|>analysis{MESSAGE}x"),
        ),
    ],
)
def test_messages_are_read_by_their_channel(items: list[str], found: ParsedPiece) -> None:
    assert parse(items) == found


def test_headers_and_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * (harmony.MAX_HEADER_CHARS + 1)
    assert HarmonyParser().push(text) == ParsedPiece(text)
    monkeypatch.setattr(harmony, "MAX_CALL_CHARS", 20)
    assert blocks.MAX_CALL_CHARS > 20
    output = [*ADD[:-2], '{"a": "' + "x" * 30 + '"}', CALL]
    assert parse(output) == ParsedPiece("".join(output[:-1]))


def test_a_continued_answer_is_text_from_the_start() -> None:
    parser = HarmonyParser(in_answer=True)
    assert parser.push("and so") == ParsedPiece("and so")
    assert not parser.in_reasoning
