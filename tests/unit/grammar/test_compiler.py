"""Limits of grammars, the cache, and that a refused one is refused again."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.bundled import MODEL_DIR
from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.errors import ConstraintFailed, FailedConstraint
from baton.grammar import sources
from baton.grammar.compiler import GrammarCompiler, GrammarLimits
from baton.grammar.tokenizer import GrammarTokenizer
from tests import grammars

HOSTILE = {
    "ambiguous": 'start: x\nx: "a" | x x | x x x',
    "nested": "start: " + "(" * 200 + '"a"' + ")*" * 200,
    "counted": 'start: (("a"{1,1000}){1,1000}){1,1000}',
    "empty loop": 'start: (""*)* "a"',
    "left recursion": 'start: start start | start | "a"',
}


def _limited(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler(grammars.compiler().tokenizer, replace(GrammarLimits(), **limits))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_checked_in_bounded_time(name: str) -> None:
    constraint = grammars.constraint(sources.grammar_text(HOSTILE[name]))
    began = time.thread_time()
    with contextlib.suppress(ConstraintFailed):
        grammars.compiler().check(constraint)
    assert time.thread_time() - began < 5.0


def test_a_hostile_schema_is_bounded() -> None:
    properties = {f"key{number}": {"type": "string"} for number in range(900)}
    constraint = grammars.constraint(sources.json_schema_grammar({"type": "object", "properties": properties}))
    with pytest.raises(ConstraintFailed) as refused:
        _limited(num_bytes=1000).check(constraint)
    assert refused.value.reason is FailedConstraint.TOO_COMPLEX
    assert "1000" in str(refused.value)


def test_a_slow_grammar_is_refused() -> None:
    with pytest.raises(ConstraintFailed) as refused:
        _limited(seconds=0.0).check(grammars.constraint(sources.regex_grammar("a+")))
    assert refused.value.reason is FailedConstraint.TOO_COMPLEX
    with pytest.raises(ConstraintFailed, match="first tokens"):
        _limited(probe_seconds=-1.0).check(grammars.constraint(sources.regex_grammar("a+")))


def test_a_refused_grammar_is_refused_again_without_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, constraint = _limited(), grammars.constraint(sources.grammar_text("start: nothing"))
    with pytest.raises(ConstraintFailed) as first:
        compiler.check(constraint)
    monkeypatch.setattr("baton.grammar.compiler.LLMatcher", None)
    for attempt in (compiler.check, compiler.compile):
        with pytest.raises(ConstraintFailed) as again:
            attempt(constraint)
        assert str(again.value) == str(first.value)
        assert again.value is not first.value


def test_the_cache_is_bounded_and_hands_out_separate_matchers() -> None:
    compiler = GrammarCompiler(grammars.compiler().tokenizer, max_cached=2)
    constraints = [grammars.constraint(sources.choice_grammar([name])) for name in ("one", "two", "three")]
    for constraint in constraints:
        compiler.compile(constraint)
    one, other = compiler.compile(constraints[0]), compiler.compile(constraints[0])
    assert one.prototypes[0] is not other.prototypes[0]
    assert len(compiler._compiled) == 2


def test_free_phases_need_no_grammar() -> None:
    constraint = Constraint((FreePhase(ends=((7, 8),)), GrammarPhase(sources.regex_grammar("a"))), loop_to=0)
    assert [prototype is None for prototype in grammars.compiler().compile(constraint).prototypes] == [True, False]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Constraint(()),
        lambda: Constraint((FreePhase(),), loop_to=1),
        lambda: GrammarPhase(""),
        lambda: FreePhase(ends=((),)),
        lambda: FreePhase(budget=3),
        lambda: FreePhase(budget=-1, on_budget=(1,)),
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        wrong()  # type: ignore[operator]


def _tokenizer_with(change: Any) -> str:
    source = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    change(source)
    return json.dumps(source)


def test_a_prefix_space_is_no_part_of_a_forced_text() -> None:
    """The library tokenizes forced bytes; with a space before them it would allow only tokens that it then refuses."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    source = _tokenizer_with(lambda tokenizer: tokenizer.update(pre_tokenizer=byte_level))
    tokenizer = GrammarTokenizer(source, grammars.VOCAB_SIZE, {0})
    constraint = Constraint((GrammarPhase(sources.json_schema_grammar({"type": "array"})),), eos=tokenizer.eos)
    GrammarCompiler(tokenizer).check(constraint)


def test_a_tokenizer_that_changes_texts_is_refused() -> None:
    source = _tokenizer_with(lambda tokenizer: tokenizer.update(normalizer={"type": "Lowercase"}))
    with pytest.raises(ValueError, match="changes texts"):
        GrammarTokenizer(source, grammars.VOCAB_SIZE, {0})


@pytest.mark.parametrize("eos", [set(), {grammars.VOCAB_SIZE}])
def test_a_tokenizer_needs_an_end_token(eos: set[int]) -> None:
    with pytest.raises(ValueError, match="ends the text"):
        GrammarTokenizer((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"), grammars.VOCAB_SIZE, eos)


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ({"config.json": {"eos_token_id": 3}}, {3}),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [4, 5]}}, {4, 5}),
        ({"config.json": {"text_config": {"eos_token_id": 6}}, "generation_config.json": {}}, {6}),
    ],
)
def test_end_tokens_of_a_model_directory(
    configs: dict[str, dict[str, Any]], expected: set[int], tmp_path: Path
) -> None:
    for name, config in configs.items():
        (tmp_path / name).write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    assert GrammarTokenizer.of_directory(tmp_path, grammars.VOCAB_SIZE).eos == expected
