"""Checks that run longer than their clients wait: how many there may be, and what they do to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from baton.bundled import MODEL_DIR
from baton.domain.constraint import Constraint
from baton.domain.errors import ConstraintFailed, FailedConstraint, Overloaded
from baton.grammar import sources
from baton.grammar.compiler import GrammarCompiler
from baton.services.router.openai.constraint import checker as module
from baton.services.router.openai.constraint.checker import ConstraintChecker
from baton.services.router.openai.constraint.reader import RequestedConstraint
from baton.services.router.text.text_model import TextModel
from tests import grammars

TIMEOUT_S = 20.0


def requested(pattern: str) -> RequestedConstraint:
    return RequestedConstraint(grammars.constraint(sources.regex_grammar(pattern)), "guided_regex")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


class Library:
    """Compiles patterns with "hostile" until it is released, using CPU time if it is `busy`."""

    def __init__(self, *, busy: bool) -> None:
        self.begun = list[str]()
        self.released = threading.Event()
        self._busy = busy

    def compile(self, constraint: Constraint) -> None:
        (text,) = constraint.grammars
        if "hostile" in text and not self.released.is_set():
            self.begun.append(text)
            while not self.released.wait(0.0 if self._busy else TIMEOUT_S):
                pass


@contextmanager
def library(monkeypatch: pytest.MonkeyPatch, *, busy: bool) -> Iterator[Library]:
    slow, check = Library(busy=busy), GrammarCompiler.check

    def slow_check(compiler: GrammarCompiler, constraint: Constraint) -> None:
        slow.compile(constraint)
        check(compiler, constraint)

    monkeypatch.setattr(GrammarCompiler, "check", slow_check)
    monkeypatch.setattr(module, "POLL_S", 0.001)
    try:
        yield slow
    finally:
        slow.released.set()


@pytest.fixture
async def checker() -> AsyncIterator[ConstraintChecker]:
    """One that has read its tokenizer."""
    checker = ConstraintChecker(TextModel.load(MODEL_DIR))
    await checker.check(requested("good"))
    with pytest.raises(ConstraintFailed):
        await checker.check(requested("(["))
    yield checker
    await until(lambda: all(check.outcome.done() for check in checker._left))


@pytest.mark.parametrize("same", [False, True])
async def test_checks_that_waited_count_those_left(monkeypatch, checker, same):
    monkeypatch.setattr(module, "MAX_CHECK_S", 0.02)
    monkeypatch.setattr(module, "MAX_LEFT", 2 if same else 1)
    monkeypatch.setattr(checker, "_running", asyncio.Semaphore(1))
    patterns = ["hostile"] * 3 if same else [f"hostile{number}" for number in range(3)]
    with library(monkeypatch, busy=True) as slow:
        outcomes = await asyncio.gather(*map(checker.check, map(requested, patterns)), return_exceptions=True)
        assert len(slow.begun) == 1
    assert [type(error) for error in outcomes] == [ConstraintFailed, *[ConstraintFailed if same else Overloaded] * 2]
    assert cast(ConstraintFailed, outcomes[0]).reason is FailedConstraint.TOO_COMPLEX


async def test_what_is_known_is_answered_beside_those_left(monkeypatch, checker):
    monkeypatch.setattr(module, "MAX_CHECK_S", 0.02)
    monkeypatch.setattr(module, "MAX_LEFT", 1)
    with library(monkeypatch, busy=True):
        with pytest.raises(ConstraintFailed, match="too complex"):
            await checker.check(requested("hostile"))
        with pytest.raises(Overloaded):
            await checker.check(requested("new"))
        await checker.check(requested("good"))
        with pytest.raises(ConstraintFailed, match="guided_regex") as refused:
            await checker.check(requested("(["))
        assert refused.value.param == "guided_regex"


async def test_a_client_that_hung_up_does_not_refuse_others(monkeypatch, checker):
    """The thread of its check goes on; it has not used up its time."""
    with library(monkeypatch, busy=False) as slow:
        first = asyncio.create_task(checker.check(requested("hostile")))
        await until(lambda: bool(slow.begun))
        first.cancel()
        await asyncio.wait([first], timeout=TIMEOUT_S)
        assert first.cancelled()
        second = asyncio.create_task(checker.check(requested("hostile")))
        await until(lambda: len(slow.begun) == 2 or second.done())
        slow.released.set()
        await second


async def test_a_check_that_broke_is_tried_again(monkeypatch):
    compiler, wrong = GrammarCompiler(grammars.compiler().tokenizer), requested("([").value
    with monkeypatch.context() as broken:
        broken.setattr(compiler, "compile", lambda constraint: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compiler.check(wrong)
    assert not compiler.known(wrong)
    for attempt in (compiler.check, compiler.known):
        with pytest.raises(ConstraintFailed):
            attempt(wrong)
