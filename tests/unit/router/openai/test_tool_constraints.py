"""Constraints of calls where the markers are tokens, as in Qwen's vocabulary: walks end in calls that are parsed."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from baton.bundled import MODEL_DIR
from baton.domain.constraint import Constraint
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import ConstraintMatcher, MaskTable
from baton.grammar.tokenizer import GrammarTokenizer
from baton.services.router.openai.fields import FieldErrors, Fields
from baton.services.router.openai.tools.reader import RequestedTools, read_tools
from baton.services.router.text.parsers.base import ToolCall
from baton.services.router.text.text_model import TextModel
from tests.grammars import VOCAB_SIZE
from tests.unit.router.text.text_models import bundled

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
STOP_SHARE = 0.5


def text_with_markers() -> TextModel:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in (OPEN, CLOSE)])
    template = "{{ tools }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}"
    return TextModel(tokenizer, {}, {"vocab_size": VOCAB_SIZE + 2, "eos_token_id": 2}, template)


TEXT = text_with_markers()
COMPILER = GrammarCompiler(GrammarTokenizer(TEXT.tokenizer_json(), TEXT.vocab_size, TEXT.eos_token_ids))


def asked(text: TextModel = TEXT, **fields: Any) -> RequestedTools:
    errors = FieldErrors()
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
        {"type": "function", "function": {"name": "now"}},
    ]
    found = read_tools(Fields({"tools": tools, **fields}, errors), text)
    errors.raise_if_any()
    assert found is not None
    return found


def walk(constraint: Constraint, seed: int, begun: list[int], compiler: GrammarCompiler = COMPILER) -> list[int]:
    """Random tokens after `begun`, until a stop id; those that end are taken half of the time."""
    draw, tokens, table = random.Random(seed), list(begun), MaskTable(1, compiler.tokenizer.num_words)
    state = ConstraintMatcher.of(compiler.compile(constraint), begun)
    while len(tokens) < 300:
        if (row := state.fill(table, 0, ())) is None:
            return tokens
        choices = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        ends = choices & TEXT.eos_token_ids
        if ends and (ends == choices or draw.random() < STOP_SHARE):
            return tokens
        tokens.append(draw.choice(sorted(choices - TEXT.eos_token_ids)))
        state.advance(tokens[-1])
    return []


def calls_of(tools: RequestedTools, tokens: list[int], text: TextModel | None = None) -> list[ToolCall]:
    """`text` None: of `TEXT`, and the output has calls only."""
    parser = tools.format.parser(tools.schemas)
    detokenizer = (text or TEXT).detokenizer(skip_special_tokens=True)
    pieces = [parser.push(detokenizer.push(token)) for token in tokens]
    pieces += [parser.push(detokenizer.finish()), parser.finish()]
    assert text is not None or not "".join(piece.text for piece in pieces).strip()
    return [call for piece in pieces for call in piece.calls]


def check(calls: list[ToolCall]) -> None:
    schemas: dict[str, dict[str, Any]] = {"weather": CITY, "now": {"type": "object"}}
    for call in calls:
        jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_begin_with_the_marker_token(choice: Any) -> None:
    tools = asked(tool_choice=choice)
    assert tools.constraint is not None
    marker, num_walks = TEXT.added_token(OPEN), 0
    for seed in range(30):
        tokens = walk(tools.constraint.value, seed, [])
        if tokens:
            num_walks += 1
            assert tokens[0] == marker
            check(found := calls_of(tools, tokens))
            assert found
            assert len(found) == 1 or choice == "required"
    assert num_walks >= 4


def test_auto_constrains_what_follows_the_marker_token() -> None:
    """Text before it is free; after the call, too, unless one call is all."""
    marker = TEXT.added_token(OPEN)
    assert marker is not None
    for parallel in (True, False):
        tools = asked(parallel_tool_calls=parallel)
        assert tools.constraint is not None
        constraint, num_calls = tools.constraint.value, 0
        assert walk(constraint, 0, [5, 6]) == [5, 6], "free text has no mask"
        for seed in range(30):
            tokens = walk(constraint, seed, [marker])
            num_calls += len(found := calls_of(tools, tokens)) if tokens else 0
            if tokens:
                check(found)
                assert len(found) == 1
        assert num_calls >= 6


def test_without_marker_tokens_auto_has_no_constraint() -> None:
    assert bundled().added_token(OPEN) is None
    plain = [{"type": "function", "function": {"name": "now"}}]
    assert asked(bundled(), tools=plain).constraint is None


def test_strict_is_kept_in_text_whose_marker_is_no_token() -> None:
    """As agents send it: `strict` in every tool, and `auto` after the first turn."""
    text = bundled()
    tools = asked(text)
    assert tools.constraint is not None
    assert not tools.calls_only
    constraint = tools.constraint.value
    compiler = GrammarCompiler(GrammarTokenizer(text.tokenizer_json(), text.vocab_size, text.eos_token_ids))
    words = [*text.encode("No call.", add_special_tokens=False)]
    assert walk(constraint, 0, words, compiler)[: len(words)] == words, "text without a call may end"
    begun = [*text.encode(f'I look. {OPEN}\n{{"name": "weather", "arguments": ', add_special_tokens=False)]
    found = [call for seed in range(20) for call in calls_of(tools, walk(constraint, seed, begun, compiler), text)]
    assert len(found) >= 8
    assert found[0].name == "weather"
    check(found)


def test_calls_have_declared_arguments_only() -> None:
    """A schema that says nothing of others allows any; a model without bounds would invent them."""
    free = {"type": "object", "properties": {"a": {"enum": [1]}}}
    for parameters, most in ((free, {"a"}), ({"type": "object", "properties": {}}, set())):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        asked_for = asked(tools=tools, tool_choice="required")
        assert asked_for.constraint is not None
        walks = [walk(asked_for.constraint.value, seed, []) for seed in range(10)]
        found = [call for tokens in walks if tokens for call in calls_of(asked_for, tokens)]
        assert found
        assert all(json.loads(call.arguments).keys() <= most for call in found)
