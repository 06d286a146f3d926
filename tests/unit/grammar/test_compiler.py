"""Limits of grammars, the cache, and that a refused one is refused again."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import pytest

from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.errors import ConstraintFailed, FailedConstraint
from baton.grammar import sources
from baton.grammar.compiler import GrammarCompiler, GrammarLimits
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
