"""Every format of tool calls: every cut gives the same, nothing is lost, and calls are those that were written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.services.router.settings import ReasoningParserChoice, ToolParserChoice
from baton.services.router.text.parsers import blocks
from baton.services.router.text.parsers.base import ParsedPiece, ToolCall
from baton.services.router.text.parsers.registry import (
    AUTO,
    HARMONY,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    tool_format,
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "array"}, {"type": "null"}]}}},
    "say": {"properties": {"text": {"type": "string"}, "on": {"type": "boolean"}, "mode": {"enum": ["x", 1]}}},
    "now": {},
    "put": {
        "properties": {"to": {"$ref": "#/$defs/place"}, "at": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "$defs": {"place": {"type": ["object", "array"]}},
    },
}
INFINITE = float("inf")
"""How Python reads a number that JSON allows and no float holds."""
LIST_OF_TAGS = {"to": ["</parameter></function>"]}
Arguments = dict[str, Any]
TEXT = st.text(alphabet="ab<>/|{}[]\"'\\`;=:,(é\n ", max_size=12)
CALLS: st.SearchStrategy[tuple[str, Arguments]] = st.one_of(
    st.builds(lambda a, b: ("add", {"a": a, "b": b}), st.integers(-9, 99), st.none() | st.lists(st.integers(0, 9))),
    st.builds(lambda text, on: ("say", {"text": text, "on": on}), TEXT, st.booleans()),
    st.just(("now", {})),
)


def as_json(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {json.dumps(arguments, ensure_ascii=False)}}}'


def deepseek(calls: list[tuple[str, Arguments]], head: str, tail: str) -> str:
    written = [f"<｜tool▁call▁begin｜>{head.format(name)}{json.dumps(a)}{tail}<｜tool▁call▁end｜>" for name, a in calls]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def kimi(calls: list[tuple[str, Arguments]]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
        for index, (name, a) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def qwen3_coder(calls: list[tuple[str, Arguments]]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in a.items())
        + "</function>\n</tool_call>"
        for name, a in calls
    )


def glm(calls: list[tuple[str, Arguments]]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>\n{as_text(value)}\n</arg_value>\n" for key, value in a.items()
        )
        + "</tool_call>"
        for name, a in calls
    )


def pythonic(calls: list[tuple[str, Arguments]]) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for name, a in calls]
    return f"[{', '.join(written)}]"


WRITERS: dict[str, Callable[[list[tuple[str, Arguments]]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{as_json(*call)}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(as_json(*call, key="parameters") for call in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}" for name, a in calls),
    "mistral_list": lambda calls: f"[TOOL_CALLS] [{', '.join(as_json(*call) for call in calls)}]",
    "deepseek_v3": lambda calls: deepseek(calls, "function<｜tool▁sep｜>{}\n```json\n", "\n```"),
    "deepseek_v31": lambda calls: deepseek(calls, "{}<｜tool▁sep｜>", ""),
    "kimi": kimi,
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "pythonic": pythonic,
}
assert {*WRITERS, HARMONY} == {*TOOL_FORMATS}
AT_HEAD = {"llama3_json", "pythonic"}
"""Their calls begin an answer."""


def parse(name: str, pieces: Sequence[str], **options: Any) -> ParsedPiece:
    parser, found = TOOL_FORMATS[name].parser(SCHEMAS, **options), ParsedPiece()
    for piece in pieces:
        found += parser.push(piece)
    return found + parser.finish()


def cut(text: str, seed: int) -> list[str]:
    draw, pieces = random.Random(seed), list[str]()
    while text:
        size = draw.randint(1, draw.choice([1, 3, 20]))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def arguments_of(calls: Sequence[ToolCall]) -> list[tuple[str, Arguments]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=40)
@given(st.lists(CALLS, min_size=1, max_size=3), st.sampled_from(["", "so ", "a < b\n"]), st.integers(0, 2**20))
def test_calls_are_those_that_were_written(
    name: str, calls: list[tuple[str, Arguments]], before: str, seed: int
) -> None:
    before = "" if name in AT_HEAD else before
    output = before + WRITERS[name](calls)
    found = parse(name, cut(output, seed))
    assert arguments_of(found.calls) == calls
    assert [call.index for call in found.calls] == list(range(len(calls)))
    assert found.text == before.rstrip()
    assert parse(name, [output]) == found
    [first, *_] = parse(name, cut(f"{output} more", seed), single=True).calls
    assert first == found.calls[0]
    assert not parse(name, [output], calls_only=True).text


def mutated(name: str, calls: list[tuple[str, Arguments]], seed: int) -> str:
    """Written calls with a part dropped, doubled, or of another format."""
    draw, output = random.Random(seed), WRITERS[name](calls)
    for _ in range(draw.randint(0, 3)):
        at, size = draw.randrange(len(output) + 1), draw.choice([1, 1, 5, 30])
        part = draw.choice(["", output[at : at + size] * 2, "</function>", "</tool_call>", "x", *WRITERS])
        output = output[:at] + part + output[at + size :]
    return output


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=60)
@given(st.lists(CALLS, max_size=2), st.sampled_from(["", "so "]), st.integers(0, 2**20), st.booleans())
def test_every_cut_of_a_broken_output_gives_the_same(
    name: str, calls: list[tuple[str, Arguments]], after: str, seed: int, single: bool
) -> None:
    output = mutated(name, calls, seed) + after
    found = parse(name, [output], single=single)
    assert parse(name, cut(output, seed), single=single) == found
    assert parse(name, [*output], single=single) == found
    assert all(call.name in SCHEMAS and isinstance(json.loads(call.arguments), dict) for call in found.calls)
    left = iter(output)
    assert all(char in left for char in found.text), "text is a part of the output, in its order"
    if not found.calls:
        assert found.text == output


@pytest.mark.parametrize("name", WRITERS)
def test_undeclared_names_and_unended_calls_are_text(name: str) -> None:
    for output in (WRITERS[name]([("nobody", {"a": 1})]), WRITERS[name]([("now", {}), ("nobody", {})])[:-3]):
        found = parse(name, [output])
        assert found.text == output or [call.name for call in found.calls] == ["now"]
    whole = WRITERS[name]([("say", {"text": "hello", "on": True})])
    cut_off = whole[: whole.index("hello") + 2]
    assert parse(name, [cut_off]) == ParsedPiece(cut_off)
    assert parse(name, [cut_off], calls_only=True) == ParsedPiece()


def test_a_list_is_a_call_as_a_whole_or_not_at_all() -> None:
    for name in ("mistral_list", "pythonic"):
        output = WRITERS[name]([("now", {}), ("nobody", {})])
        assert parse(name, [output]) == ParsedPiece(output)


@pytest.mark.parametrize(
    ("name", "output", "arguments"),
    [
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abc123DEF[ARGS]{"a": 1}', {"a": 1}),
        ("mistral", '[TOOL_CALLS]now{"a": 1}', {"a": 1}),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {"a": 1}}', {"a": 1}),
        ("llama3_json", '{"name": "now", "arguments": {"a": 1}}', {"a": 1}),
        ("pythonic", "<|python_start|>[now(a=1)]<|python_end|>", {"a": 1}),
        ("pythonic", "[now(a={'b': [True, None, 1.5]})]", {"a": {"b": [True, None, 1.5]}}),
        ("kimi", '<|tool_call_begin|>now:7<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', {"a": 1}),
        ("qwen3_coder", "<function=now>\n<parameter=a>\n1\n</parameter>\n</function>", {"a": "1"}),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>x</parameter></function></tool_call>", {"a": "x"}),
        ("qwen3_coder", "<function=say><parameter=on>True</parameter></function>", {"on": True}),
        ("qwen3_coder", "<function=say><parameter=text></function></parameter></function>", {"text": "</function>"}),
        ("qwen3_coder", "<function=say><parameter=mode>1</parameter></function>", {"mode": 1}),
        ("qwen3_coder", "<function=say><parameter=mode>y</parameter></function>", {"mode": "y"}),
        ("qwen3_coder", "<function=put><parameter=at>null</parameter></function>", {"at": None}),
        ("qwen3_coder", "<function=put><parameter=at>1</parameter></function>", {"at": "1"}),
        ("qwen3_coder", '<function=put><parameter=to>{"x": 1e999}</parameter></function>', {"to": {"x": INFINITE}}),
        ("qwen3_coder", '<function=put><parameter=to>["</parameter></function>"]</parameter></function>', LIST_OF_TAGS),
        ("glm", "<tool_call>now\n</tool_call>", {}),
    ],
)
def test_variants_are_calls(name: str, output: str, arguments: Arguments) -> None:
    found = parse(name, [output])
    assert [call[1] for call in arguments_of(found.calls)] == [arguments]
    assert not found.text


ODD = '{"x": "it}'
ODD_TAG = '["</parameter></function>'


@pytest.mark.parametrize(
    ("name", "output", "calls"),
    [
        ("glm", f"<arg_key>to</arg_key>\n<arg_value>{ODD}</arg_value>\n</tool_call>", [{"to": ODD}]),
        ("glm", f"<arg_key>to</arg_key><arg_value>{ODD}</arg_value><arg_key>at</arg_key>\n<arg_value>x</arg_value>"
         "</tool_call>", [{"to": ODD, "at": "x"}]),
        ("glm", f'<arg_key>to</arg_key><arg_value>{ODD}</arg_value></tool_call>\n<tool_call>put\n<arg_key>to</arg_key>'
         '\n<arg_value>["</arg_value></tool_call>"]</arg_value></tool_call>',
         [{"to": ODD}, {"to": ["</arg_value></tool_call>"]}]),
        ("qwen3_coder", f"<parameter=to>{ODD}</parameter>\n</function></tool_call>", [{"to": ODD}]),
        ("qwen3_coder", f'<parameter=to>{ODD_TAG}",\n 1]</parameter>\n</function></tool_call>',
         [{"to": ["</parameter></function>", 1]}]),
        ("qwen3_coder", f'<parameter=to>{ODD_TAG}"]}}</parameter>\n</function></tool_call>', [{"to": '["'}]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(5))
def test_an_odd_quote_does_not_swallow_the_next_call(name: str, output: str, calls: list[Arguments], seed: int) -> None:
    head = "<tool_call>put\n" if name == "glm" else "<tool_call><function=put>"
    after = WRITERS[name]([("now", {})])
    found = parse(name, [head + output + "\n" + after])
    assert [call[1] for call in arguments_of(found.calls)][: len(calls)] == calls
    assert "now" in [call.name for call in found.calls] or found.text, "the next call is seen"
    assert parse(name, cut(head + output + "\n" + after, seed)) == found


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", 'so {"name": "now", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>import os"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[now(1)]"),
        ("pythonic", "[now(a=b)]"),
        ("pythonic", "[now(a=1e999)]"),
        ("pythonic", "[now(**{})]"),
        ("pythonic", "[now(a=" + "[" * 99),
        ("pythonic", "[now()" + ")" * 9),
        ("mistral", "[TOOL_CALLS] no list"),
        ("qwen3_coder", "<function=now>x" + "</function>x" * 20),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>" + "x" * 600),
    ],
)
def test_what_is_no_call_is_text(name: str, output: str) -> None:
    assert parse(name, [output]) == parse(name, [*output]) == ParsedPiece(output)


@pytest.mark.parametrize("name", WRITERS)
def test_a_block_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_CALL_CHARS", 200)
    output = WRITERS[name]([("say", {"text": "x" * 300, "on": True})])
    parser = TOOL_FORMATS[name].parser(SCHEMAS)
    shown = "".join(parser.push(char).text for char in output[:300])
    assert len(shown) > 200
    assert parse(name, [output]).calls == ()
    assert shown + parser.push(output[300:]).text + parser.finish().text == output == parse(name, [output]).text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("x <tool_call> y", "hermes"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<tool_call><arg_key>", "glm"),
        ("[TOOL_CALLS][ARGS]", "mistral"),
        ("[TOOL_CALLS]", "mistral_list"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|tool_call_argument_begin|>", "kimi"),
        ("<|python_tag|>", "llama3_json"),
        ("[func_name1(params_name1=", "pythonic"),
    ],
)
def test_the_format_is_that_of_the_template(template: str, name: str) -> None:
    assert tool_format(AUTO, template) is TOOL_FORMATS[name]
    assert tool_format(name, "plain") is TOOL_FORMATS[name]
    assert tool_format(NONE, template) is None
    assert tool_format(AUTO, "plain") is None


def test_settings_name_every_format() -> None:
    assert {choice.value for choice in ToolParserChoice} == {AUTO, NONE, *TOOL_FORMATS}
    assert {choice.value for choice in ReasoningParserChoice} == {AUTO, NONE, *REASONING_FORMATS}
