"""Reasoning before a constrained answer: random walks think, end their thought, and keep to the form."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from baton.domain.constraint import Constraint
from baton.domain.errors import ConstraintFailed, InvalidRequest
from baton.domain.ids import RequestId
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import ConstraintMatcher, MaskTable
from baton.grammar.tokenizer import GrammarTokenizer
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.text.parsers.reasoning import ReasoningStart
from baton.services.router.text.text_model import TextModel
from tests.unit.router.text.text_models import marked

OPEN, CLOSE = "<think>", "</think>"
CALL_MARKERS = ("<tool_call>", "</tool_call>")
TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined %}<think>{{ '\\n' if enable_thinking else '</think>' }}{% endif %}<tool_call>"
).replace("<tool_call>", "{# <tool_call> #}")
MODEL = marked(TEMPLATE, [OPEN, CLOSE, *CALL_MARKERS])
COMPILER = GrammarCompiler(GrammarTokenizer(MODEL.tokenizer_json(), MODEL.vocab_size, MODEL.eos_token_ids))
FORM: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "now"}}]}


def id_of(marker: str) -> int:
    found = MODEL.added_token(marker)
    assert found is not None
    return found


def asked(model: TextModel = MODEL, **fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return RequestValidator(model, "m", 4096, 1.0).chat(body, RequestMetadata(RequestId("call"), 1, 5))


def constraint_of(request: ValidRequest) -> Constraint:
    value = request.sequences[0].constraint
    assert value is not None
    return value


def new_table() -> MaskTable:
    return MaskTable(1, COMPILER.tokenizer.num_words)


def walk(constraint: Constraint, seed: int, *, think: bool | None = None, stop_at: int = 200) -> list[int]:
    """Random tokens until the output may end. `think`: takes, or avoids, the opening token; ends thoughts soon."""
    draw, tokens, table = random.Random(seed), list[int](), new_table()
    state = ConstraintMatcher(COMPILER.compile(constraint))
    while len(tokens) < stop_at:
        row = state.fill(table, 0, ())
        bits = np.ones(MODEL.vocab_size) if row is None else np.unpackbits(row.view(np.uint8), bitorder="little")
        choices = set(np.flatnonzero(bits).tolist())
        if choices & MODEL.eos_token_ids and state.is_complete:
            return tokens
        token = draw.choice(sorted(choices - MODEL.eos_token_ids))
        if not tokens and think is not None:
            token = id_of(OPEN) if think else draw.choice(sorted(choices - {id_of(OPEN)}))
        elif id_of(CLOSE) in choices and draw.random() < 0.3:
            token = id_of(CLOSE)
        tokens.append(token)
        state.advance(token)
    raise AssertionError("the output never ends")


def answer_of(tokens: list[int]) -> str:
    rest = tokens[tokens.index(id_of(CLOSE)) + 1 :] if id_of(CLOSE) in tokens else tokens
    return MODEL.decode(rest, skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(8))
def test_a_form_follows_the_reasoning(seed: int) -> None:
    opened, possible = asked(enable_thinking=True, **FORM), asked(**FORM)
    assert opened.reasoning is not None
    assert possible.reasoning is not None
    assert (opened.reasoning.start, possible.reasoning.start) == (ReasoningStart.OPEN, ReasoningStart.POSSIBLE)
    for tokens in (walk(constraint_of(opened), seed), walk(constraint_of(possible), seed, think=True)):
        assert id_of(CLOSE) in tokens
        assert json.loads(answer_of(tokens)) in ("yes", "no")
    assert json.loads(answer_of(walk(constraint_of(possible), seed, think=False))) in ("yes", "no")
    closed = asked(enable_thinking=False, **FORM)
    assert id_of(OPEN) not in walk(constraint_of(closed), seed)
    assert json.loads(answer_of(walk(constraint_of(closed), seed))) in ("yes", "no")


@pytest.mark.parametrize("thinking", [True, None])
def test_required_calls_follow_the_reasoning(thinking: bool | None) -> None:
    request = asked(enable_thinking=thinking, tool_choice="required", parallel_tool_calls=False, **TOOLS)
    tokens = walk(constraint_of(request), 3, think=None if thinking else True, stop_at=2000)
    assert answer_of(tokens).startswith("<tool_call>")


def test_auto_calls_are_constrained_after_the_reasoning_only() -> None:
    value = constraint_of(asked(enable_thinking=True, **TOOLS))
    marker = id_of("<tool_call>")
    state = ConstraintMatcher.of(COMPILER.compile(value), [marker, 5])
    assert state.fill(new_table(), 0, ()) is None
    state = ConstraintMatcher.of(COMPILER.compile(value), [marker, 5, id_of(CLOSE), marker])
    assert state.fill(new_table(), 0, ()) is not None


@pytest.mark.parametrize("fields", [{}, FORM])
@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_ends_the_reasoning(fields: dict[str, Any], budget: int) -> None:
    value = constraint_of(asked(enable_thinking=True, thinking_token_budget=budget, **fields))
    state = ConstraintMatcher.of(COMPILER.compile(value), [5] * budget)
    row = state.fill(new_table(), 0, ())
    assert row is not None
    assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() == [id_of(CLOSE)]
    state.advance(id_of(CLOSE))
    assert (state.fill(new_table(), 0, ()) is not None) is bool(fields), "the answer is free without a form"


def test_a_budget_counts_from_the_beginning_of_the_reasoning() -> None:
    value = constraint_of(asked(thinking_token_budget=2))
    assert ConstraintMatcher.of(COMPILER.compile(value), [5] * 9).fill(new_table(), 0, ()) is None
    assert ConstraintMatcher.of(COMPILER.compile(value), [id_of(OPEN), 5, 5]).fill(new_table(), 0, ()) is not None


def test_what_cannot_be_counted_or_kept_is_refused_by_name() -> None:
    plain = marked(TEMPLATE, CALL_MARKERS)
    with pytest.raises(ConstraintFailed, match=r"thinking_token_budget: .* not one token"):
        asked(plain, enable_thinking=True, thinking_token_budget=3)
    with pytest.raises(ConstraintFailed, match=r"response_format: .* not one token") as refusal:
        asked(plain, enable_thinking=True, **FORM)
    assert refusal.value.param == "response_format"
    with pytest.raises(ConstraintFailed, match="thinking_token_budget"):
        asked(thinking_token_budget=3, **FORM)
    for fields in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        with pytest.raises(InvalidRequest, match="thinking_token_budget"):
            asked(thinking_token_budget=3, **fields)
    with pytest.raises(InvalidRequest, match="thinking_token_budget"):
        asked(marked("plain{{ messages }}", []), thinking_token_budget=3)


@pytest.mark.parametrize(
    ("template", "fields", "prompt"),
    [
        ("{{ reasoning_effort }}|{{ enable_thinking }}", {"reasoning_effort": "low"}, "low|True"),
        ("{{ reasoning_effort }}|{{ thinking }}", {"reasoning": {"effort": "high"}}, "high|True"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ thinking }}", {"reasoning": {"enabled": False}}, "False"),
        ("{{ thinking }}", {"reasoning": {"enabled": True}}, "True"),
        ("plain", {"reasoning_effort": "none"}, "plain"),
    ],
)
def test_effort_is_read_by_the_template(template: str, fields: dict[str, Any], prompt: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    validator = RequestValidator(marked(template, []), "m", 4096, 1.0)
    assert validator.render(body, RequestMetadata(RequestId("call"), 1, 5))[1] == prompt


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ("plain", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("plain", {"reasoning": {"effort": "low"}}, "reasoning"),
        ("{{ thinking }}", {"reasoning_effort": "much"}, "reasoning_effort"),
        ("{{ thinking }}", {"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ("{{ thinking }}", {"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
        ("{{ thinking }}", {"reasoning": {"effort": "none", "enabled": True}}, "reasoning"),
        ("{{ thinking }}", {"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning"),
        (
            "{{ thinking }}",
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
            "reasoning_effort",
        ),
        ("{{ thinking }}", {"reasoning_format": "deepseek-legacy"}, "reasoning_format"),
        ("plain", {"messages": [{"role": "assistant", "content": "", "reasoning": 5}]}, "messages[0].reasoning"),
    ],
)
def test_an_effort_without_an_effect_is_refused(template: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        asked(marked(template, []), **fields)
    assert refusal.value.param == param
