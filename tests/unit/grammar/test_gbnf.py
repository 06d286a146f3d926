"""GBNF grammars become the library's own Lark ones, in time that grows with their length."""

from __future__ import annotations

import random

import pytest
from llguidance.gbnf_to_lark import RuleRefNode, any_to_lark

from baton.domain.errors import ConstraintFailed
from baton.grammar.gbnf import MAX_GRAMMAR_CHARS, as_lark

NAMES = [f"rule-{index}" for index in range(8)]
LARGE = (
    "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(3800)) + 'a3800 ::= "x"\n',
    "root ::= " + " | ".join(f'"a{n}"' for n in range(5000)),
    "\n" * 60_000 + 'root ::= "a"',
    'root ::= "a"' + " " * 60_000,
    "# a\n" * 15_000 + 'root ::= "a"',
    "root ::= [" + "ab" * 30_000 + "]",
)


def lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def random_grammar(seed: int) -> str:
    """Rules that refer to each other at random, also in circles."""
    draw = random.Random(seed)

    def rule() -> str:
        parts = [draw.choice([*NAMES, '"x"', "[a-z]", f"({draw.choice(NAMES)} | [0-9])"]) for _ in range(3)]
        return " ".join(part + draw.choice(["", "", "*", "?", "{2,3}"]) for part in parts[: draw.randint(1, 3)])

    return "".join(f"{name} ::= {rule()} | {rule()}\n" for name in ["root", *NAMES])


@pytest.mark.parametrize("seed", range(60))
def test_rules_are_those_of_the_library(seed: int) -> None:
    source = random_grammar(seed)
    assert lines(as_lark(source)) == lines(any_to_lark(source))


@pytest.mark.parametrize("source", ['start: "a"\n', '%llguidance {}\nstart: "a"', '  start : "a"', 'x: "a"\nstart: x'])
def test_lark_is_left_as_it_is(source: str) -> None:
    assert as_lark(source) == source


@pytest.mark.parametrize("source", LARGE, ids=range(len(LARGE)))
def test_every_rule_is_looked_at_a_few_times(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library alone looks at the first of them seven million times."""
    num_looks, look = 0, RuleRefNode.is_terminal

    def counted(node: RuleRefNode) -> bool:
        nonlocal num_looks
        num_looks += 1
        return look(node)

    monkeypatch.setattr(RuleRefNode, "is_terminal", counted)
    assert len(source) <= MAX_GRAMMAR_CHARS
    assert "\nstart: " in as_lark(source)
    assert num_looks <= 2 * source.count("::=")


def test_a_grammar_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConstraintFailed, match="65537 characters"):
        as_lark("x" * (MAX_GRAMMAR_CHARS + 1))
