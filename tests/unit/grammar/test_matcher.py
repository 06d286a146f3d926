"""The state of a constraint is a fold over tokens: phases, ends, stop ids, and what is refused."""

from __future__ import annotations

import random

import pytest

from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.errors import ConstraintFailed, FailedConstraint
from baton.grammar import sources
from tests import grammars

EOS = set(grammars.compiler().tokenizer.eos)
CALL = GrammarPhase(sources.choice_grammar(["yes", "no"]))


def test_a_state_depends_on_the_tokens_only() -> None:
    constraint = grammars.constraint(sources.json_schema_grammar({"type": "array", "items": {"type": "integer"}}))
    draw, tokens, state = random.Random(1), list[int](), grammars.matcher(constraint)
    for _ in range(40):
        choices = grammars.allowed(state)
        assert choices == grammars.allowed(grammars.matcher(constraint, tuple(tokens)))
        assert choices is not None
        if choices <= EOS:
            return
        tokens.append(draw.choice(sorted(choices - EOS)))
        state.advance(tokens[-1])


def test_a_copy_goes_on_by_itself_through_phases() -> None:
    """The marker 5 ends the free text; the choice that follows ends the whole."""
    constraint = Constraint((FreePhase(ends=((8, 5),)), CALL), eos=frozenset(EOS))
    state, yes = grammars.matcher(constraint, (9, 8)), grammars.encode("yes")
    assert state.num_allowed((5, *yes)) == 1 + len(yes)
    assert state.num_allowed((5, *yes, *yes)) == 1 + len(yes)
    ahead = state.copy()
    for token in (5, *yes):
        ahead.advance(token)
    assert ahead.is_complete
    assert grammars.allowed(ahead) == EOS
    assert grammars.allowed(state) is None
    state.advance(6)
    assert state.num_allowed((5, *yes)) == 1 + len(yes), "the marker was not complete"
    assert state.num_tokens == 3


def test_only_stop_ids_follow_a_complete_text() -> None:
    state = grammars.matcher(grammars.constraint(sources.choice_grammar(["yes"])), grammars.encode("yes"))
    assert state.is_complete
    assert grammars.allowed(state) == EOS
    assert grammars.allowed(state, frozenset({77})) == {*EOS, 77}


def test_a_text_that_may_go_on_allows_both() -> None:
    state = grammars.matcher(grammars.constraint(sources.regex_grammar("a+")), grammars.encode("a"))
    choices = grammars.allowed(state)
    assert choices is not None
    assert choices > EOS


def test_an_incomplete_text_allows_no_stop_id() -> None:
    state = grammars.matcher(grammars.constraint(sources.json_object_grammar()), grammars.encode("{"))
    assert not state.is_complete
    choices = grammars.allowed(state, frozenset({77}))
    assert choices is not None
    assert not choices & EOS
    assert 77 not in choices or "}" not in grammars.decode([77])


def test_min_tokens_do_not_forbid_the_only_token() -> None:
    phase = GrammarPhase(sources.regex_grammar("a{1,3}"))
    constraint = Constraint((phase,), eos=frozenset(EOS), min_tokens=2)
    a = grammars.encode("a")
    one = grammars.allowed(grammars.matcher(constraint, a), frozenset({77}))
    assert one is not None
    assert not one & {*EOS, 77}
    two = grammars.allowed(grammars.matcher(constraint, a * 2), frozenset({77}))
    assert two is not None
    assert two > {*EOS, 77}
    short = Constraint((GrammarPhase(sources.choice_grammar(["yes"])),), eos=frozenset(EOS), min_tokens=9)
    assert grammars.allowed(grammars.matcher(short, grammars.encode("yes"))) == EOS


def test_tokens_that_are_not_allowed_are_refused() -> None:
    constraint = grammars.constraint(sources.choice_grammar(["yes"]))
    with pytest.raises(ConstraintFailed) as refused:
        grammars.matcher(constraint, grammars.encode("no"))
    assert refused.value.reason is FailedConstraint.PREFIX


def test_a_free_phase_masks_nothing_until_its_marker() -> None:
    constraint = Constraint((FreePhase(ends=((5, 6),)), CALL), loop_to=0, eos=frozenset(EOS))
    assert grammars.allowed(grammars.matcher(constraint, (9, 5, 9, 6))) is None
    choices = grammars.allowed(grammars.matcher(constraint, (9, 5, 6)))
    assert choices is not None
    assert not choices & EOS
    assert grammars.allowed(grammars.matcher(constraint, (9, 5, 6, *grammars.encode("no")))) is None


def test_a_grammar_that_is_not_last_ends_without_a_stop_id() -> None:
    constraint = Constraint((CALL, FreePhase()), eos=frozenset(EOS))
    assert grammars.allowed(grammars.matcher(constraint, grammars.encode("yes"))) is None


def test_a_budget_forces_its_end_tokens() -> None:
    phase = FreePhase(ends=((5,),), budget=2, on_budget=(11, 12), may_stop=False)
    constraint = Constraint((phase, CALL), eos=frozenset(EOS))
    free = grammars.allowed(grammars.matcher(constraint, (9,)))
    assert free is not None
    assert not free & EOS
    assert grammars.allowed(grammars.matcher(constraint, (9, 9))) == {11}
    assert grammars.allowed(grammars.matcher(constraint, (9, 9, 11))) == {12}
    with pytest.raises(ConstraintFailed):
        grammars.matcher(constraint, (9, 9, 9))
    assert not (grammars.allowed(grammars.matcher(constraint, (9, 9, 11, 12))) or EOS) & EOS
    assert not (grammars.allowed(grammars.matcher(constraint, (5,))) or EOS) & EOS


def test_banned_tokens_of_a_free_phase() -> None:
    state = grammars.matcher(Constraint((FreePhase(banned=frozenset({3, 40})),), eos=frozenset(EOS)), (9,))
    choices = grammars.allowed(state)
    assert choices == set(range(grammars.VOCAB_SIZE)) - {3, 40}


def test_ignored_eos_does_not_extend_a_complete_text() -> None:
    phase = GrammarPhase(sources.regex_grammar("a{1,2}"))
    constraint = Constraint((phase,), eos=frozenset(EOS), ignore_eos=True)
    one = grammars.allowed(grammars.matcher(constraint, grammars.encode("a")))
    assert one is not None
    assert not one & EOS
    assert grammars.allowed(grammars.matcher(constraint, grammars.encode("a") * 2)) == EOS
