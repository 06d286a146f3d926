"""Constraints of calls in every format: random walks end in calls that the format's parser reads, of the schema."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from baton.domain.constraint import Constraint
from baton.domain.errors import ConstraintFailed, InvalidRequest
from baton.domain.ids import RequestId
from baton.domain.request import FinishReason, OutputToken
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import ConstraintMatcher, MaskTable
from baton.grammar.tokenizer import GrammarTokenizer
from baton.services.router.generation import TokenChunk
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.streaming.answer_parser import answer_parser
from baton.services.router.text.choice_text import ChoiceText, TokenEvent
from baton.services.router.text.parsers.base import joined_calls
from baton.services.router.text.parsers.registry import TOOL_FORMATS
from baton.services.router.text.text_model import TextModel
from tests.unit.router.text.text_models import marked

CONSTRAINED = [*TOOL_FORMATS]
WRITTEN = {"qwen3_coder", "glm", "pythonic"}
"""Formats whose arguments are no JSON: their calls come whole."""
TRIGGERED = [name for name in CONSTRAINED if TOOL_FORMATS[name].trigger]
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
EMPTY: dict[str, Any] = {"type": "object", "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": CITY, "now": EMPTY}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
WEATHER = {"type": "function", "function": {"name": "weather"}}


@cache
def model_of(name: str, *, special: bool = True) -> TextModel:
    """A model of this format, whose markers are special tokens."""
    template = f"{{# {' '.join(TOOL_FORMATS[name].signatures[0])} #}}{{{{ tools }}}}"
    return marked(template, TOOL_FORMATS[name].markers, special=special)


@cache
def compiler_of(name: str) -> GrammarCompiler:
    model = model_of(name)
    return GrammarCompiler(GrammarTokenizer(model.tokenizer_json(), model.vocab_size, model.eos_token_ids))


def asked(name: str, **fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return RequestValidator(model_of(name), "m", 4096, 1.0).chat(body, RequestMetadata(RequestId("call"), 1, 5))


def constraint_of(request: ValidRequest) -> Constraint:
    value = request.sequences[0].constraint
    assert value is not None
    return value


def walk(name: str, constraint: Constraint, seed: int, begun: list[int]) -> list[int] | None:
    """Random tokens after `begun`, until the output may end, half of the time; None for one that takes too long."""
    compiler, eos = compiler_of(name), model_of(name).eos_token_ids
    draw, tokens, table = random.Random(seed), list(begun), MaskTable(1, compiler.tokenizer.num_words)
    state = ConstraintMatcher.of(compiler.compile(constraint), begun)
    while len(tokens) < 400:
        if (row := state.fill(table, 0, ())) is None:
            return tokens
        choices = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        if choices & eos and (choices <= eos or draw.random() < 0.5):
            return tokens
        tokens.append(draw.choice(sorted(choices - eos)))
        state.advance(tokens[-1])
    return None


def read(name: str, request: ValidRequest, tokens: list[int]) -> list[TokenEvent]:
    text = model_of(name)
    choice = ChoiceText(
        0,
        request.sequences[0].stop,
        text.detokenizer(skip_special_tokens=True),
        (),
        parser=answer_parser(request, text),
    )
    outputs = tuple(OutputToken(index, token) for index, token in enumerate([*tokens, 2]))
    return choice.events(TokenChunk(outputs, 0, FinishReason.STOP))


def check(name: str, events: list[TokenEvent]) -> int:
    """The number of calls; all are of their schema, came in parts, and there is no text."""
    calls = joined_calls(call for event in events for call in event.calls)
    num_long = 0 if name in WRITTEN else sum(len(call.arguments) > 8 for call in calls)
    assert sum(len(event.calls) for event in events) >= len(calls) + num_long
    assert not "".join(event.text for event in events).strip()
    for call in calls:
        jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.arguments))
    return len(calls)


@pytest.mark.parametrize("name", CONSTRAINED)
@pytest.mark.parametrize("choice", ["required", WEATHER])
def test_required_calls_are_read_by_their_parser(name: str, choice: Any) -> None:
    request = asked(name, tool_choice=choice)
    counts = []
    for seed in range(12):
        tokens = walk(name, constraint_of(request), seed, [])
        if tokens is not None:
            counts.append(check(name, read(name, request, tokens)))
    assert len(counts) >= 3
    assert min(counts) >= 1
    assert choice == "required" or max(counts) == 1


@pytest.mark.parametrize("name", TRIGGERED)
@pytest.mark.parametrize("parallel", [True, False])
def test_auto_constrains_what_follows_the_trigger_token(name: str, parallel: bool) -> None:
    request = asked(name, parallel_tool_calls=parallel)
    trigger = model_of(name).added_token(TOOL_FORMATS[name].trigger)
    assert trigger is not None
    free = walk(name, constraint_of(request), 0, [5, 6])
    assert free == [5, 6], "free text has no mask"
    counts = []
    for seed in range(12):
        tokens = walk(name, constraint_of(request), seed, [trigger])
        if tokens is not None:
            counts.append(check(name, read(name, request, tokens)))
    assert len(counts) >= 3
    assert min(counts) >= 1
    assert parallel or max(counts) == 1


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if TOOL_FORMATS[name].syntax.head])
def test_auto_is_calls_or_a_text_that_begins_like_none(name: str) -> None:
    """Formats without a marker: with `strict` a text cannot become a call that no schema has held."""
    request, text, format = asked(name), model_of(name), TOOL_FORMATS[name]
    value, head, opening = constraint_of(request), format.syntax.head, format.syntax.openings[0]

    def encoded(*parts: str) -> list[int]:
        return [token for part in parts for token in text.encode(part, add_special_tokens=False)]

    for seed in range(12):
        tokens = walk(name, value, seed, encoded(head))
        assert tokens is None or check(name, read(name, request, tokens)) >= 1
    begun = ConstraintMatcher.of(compiler_of(name).compile(value), [])
    for ids in ([], encoded("So "), encoded("So ", head), encoded(" \n ")):
        assert ConstraintMatcher.of(compiler_of(name).compile(value), ids).is_complete
    for ids in (encoded(head, "1"), encoded(" \n ", head), encoded("So ", opening), encoded("So ", "<", opening[1:])):
        assert begun.num_allowed(ids) < len(ids)
    plain = [{"type": "function", "function": {"name": "now"}}]
    assert asked(name, tools=plain).sequences[0].constraint is None


def test_harmony_refuses_strict_with_auto_by_name() -> None:
    with pytest.raises(InvalidRequest, match="strict of weather needs tool_choice") as refusal:
        asked("harmony")
    assert refusal.value.param == "tools"


def test_harmony_forms_follow_the_final_header_and_calls_an_analysis() -> None:
    model = model_of("harmony")
    header = [model.added_token("<|channel|>"), *model.encode("final", add_special_tokens=False)]
    request = asked(
        "harmony", tools=None, response_format={"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
    )
    tokens = walk("harmony", constraint_of(request), 0, [5, *header, model.added_token("<|message|>")])  # type: ignore[list-item]
    assert tokens is not None
    events = read("harmony", request, [*tokens[1:]])
    assert "".join(event.text for event in events) == "7"
    with pytest.raises(ConstraintFailed, match="thinking_token_budget"):
        asked("harmony", tools=None, thinking_token_budget=5)
    for fields in ({"reasoning_effort": "none"}, {"separate_reasoning": False}, {"reasoning_format": "none"}):
        with pytest.raises(InvalidRequest, match=next(iter(fields))):
            asked("harmony", tools=None, **fields)


FORM: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}}


@pytest.mark.parametrize("name", TRIGGERED)
def test_with_a_form_an_answer_is_calls_or_of_the_form(name: str) -> None:
    request = asked(name, **FORM)
    kinds = set()
    for seed in range(16):
        tokens = walk(name, constraint_of(request), seed, [])
        if tokens is not None:
            events = read(name, request, tokens)
            text = "".join(event.text for event in events)
            kinds.add(check(name, events) > 0 if not text else json.loads(text) in ("yes", "no"))
    assert kinds == {True}
    for begun in (
        model_of(name).added_token(TOOL_FORMATS[name].trigger),
        *model_of(name).encode('"', add_special_tokens=False),
    ):
        assert begun is not None
        ConstraintMatcher.of(compiler_of(name).compile(constraint_of(request)), [begun])
    required = asked(name, tool_choice="required")
    assert asked(name, tool_choice="required", **FORM).sequences == required.sequences


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name not in TRIGGERED])
def test_calls_without_a_marker_refuse_a_form_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined with response_format"):
        asked(name, tools=[{"type": "function", "function": {"name": "now"}}], **FORM)


def test_a_structural_tag_constrains_what_follows_its_trigger() -> None:
    structure = {"begin": "<fun=weather>", "schema": CITY, "end": "</fun>"}
    marker = {"begin": '[TOOL_CALLS]weather{"go": ', "schema": {"type": "boolean"}, "end": "}"}
    tag = {"structures": [structure, marker], "triggers": ["<fun", "[TOOL_CALLS]"]}
    request = asked("mistral", tools=None, structured_outputs={"structural_tag": tag})
    model, value = model_of("mistral"), constraint_of(request)
    for seed in range(6):
        begun = [*model.encode("so <fun", add_special_tokens=False)]
        tokens = walk("mistral", value, seed, begun)
        assert tokens is None or model.decode(tokens, skip_special_tokens=False).startswith("so <fun=weather>{")
        begun = [*model.encode("so ", add_special_tokens=False), model.added_token("[TOOL_CALLS]")]  # type: ignore[list-item]
        compiler = compiler_of("mistral")
        row = ConstraintMatcher.of(compiler.compile(value), begun).fill(
            MaskTable(1, compiler.tokenizer.num_words), 0, ()
        )
        assert row is not None
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        assert {model.token_text(token)[0] for token in allowed} == {"w"}
