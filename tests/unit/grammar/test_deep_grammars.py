"""Grammars whose rules refer to the next one: the library recurses, and an overflow of the stack ends the process.

So they are compiled in a process of their own, as routers and as workers do it, in threads with stacks of 8 MiB.
"""

from __future__ import annotations

import asyncio
import itertools
import string
import subprocess
import sys
import threading
import time

import pytest

from baton.bundled import MODEL_DIR
from baton.domain.constraint import Constraint, GrammarPhase
from baton.domain.errors import ConstraintFailed
from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.engine.masks import MaskFiller
from baton.grammar import sources
from baton.grammar.compiler import MAX_GRAMMAR_BYTES, GrammarCompiler
from baton.grammar.deep_stack import DeepThread, call_deep, cpu_s
from baton.services.router.openai.constraint.checker import ConstraintChecker
from baton.services.router.openai.constraint.reader import RequestedConstraint
from baton.services.router.text.text_model import TextModel
from baton.worker.constraints import prepare_constraint
from tests import grammars

TIMEOUT_S = 120.0
STACK_BYTES = 8 * 1024 * 1024
NAMES = ["".join(name) for length in (1, 2, 3) for name in itertools.product(string.ascii_lowercase, repeat=length)]


def lark_chain(num_rules: int, before: str = "", after: str = "") -> str:
    rules = "".join(f"{NAMES[n]}:{before}{NAMES[n + 1]}{after}\n" for n in range(num_rules))
    return f'start:{NAMES[0]}\n{rules}{NAMES[num_rules]}:"x"\n'


def gbnf_chain(num_rules: int) -> str:
    rules = "".join(f"{NAMES[n]}::={NAMES[n + 1]}\n" for n in range(num_rules))
    return f'root ::= {NAMES[0]}\n{rules}{NAMES[num_rules]}::="x" root?\n'


def schema_chain(num_rules: int, keyword: str) -> str:
    def rule(number: int) -> dict[str, object]:
        below = {"$ref": f"#/$defs/{number + 1}"}
        return {keyword: [below] if keyword == "anyOf" else below}

    names: dict[str, object] = {str(number): rule(number) for number in range(num_rules)}
    return sources.json_schema_grammar({"$ref": "#/$defs/0", "$defs": {**names, str(num_rules): {"type": "null"}}})


def deep_grammars() -> dict[str, str]:
    return {
        "rules": sources.grammar_text(lark_chain(7500)),
        "groups": sources.grammar_text(lark_chain(5400, "((", "))")),
        "terminals": sources.grammar_text(lark_chain(7500).upper().replace("START", "start").replace('"X"', '"x"')),
        "gbnf": sources.grammar_text(gbnf_chain(5500)),
        "items": schema_chain(1500, "items"),
        "anyOf": schema_chain(1400, "anyOf"),
    }


def test_the_deepest_grammars_are_as_long_as_a_grammar_may_be() -> None:
    lengths = {name: len(grammar.encode()) for name, grammar in deep_grammars().items()}
    assert max(lengths.values()) <= MAX_GRAMMAR_BYTES
    assert min(lengths.values()) > 0.75 * MAX_GRAMMAR_BYTES, lengths


async def _compile(grammar: str, checker: ConstraintChecker, filler: MaskFiller) -> list[str]:
    """What a router and a worker say. A slow machine may find one too complex."""
    constraint = Constraint((GrammarPhase(grammar),), eos=grammars.compiler().tokenizer.eos)
    request = EngineRequest(
        AttemptId(RequestId("r"), 1), (5,), 1, SamplingParams(), StopParams(4), constraint=constraint
    )
    answers = list[str]()
    for attempt in (checker.check(RequestedConstraint(constraint, "grammar")), prepare_constraint(filler, request)):
        try:
            await attempt
            answers.append("accepted")
        except ConstraintFailed as error:
            answers.append(error.reason.value)
    return answers


def compile_all() -> None:
    """Run in a process of its own."""

    async def run() -> None:
        checker = ConstraintChecker(TextModel.load(MODEL_DIR))
        filler = MaskFiller(GrammarCompiler(grammars.compiler().tokenizer))
        for name, grammar in deep_grammars().items():
            sys.stdout.write(f"{name} {' '.join(await _compile(grammar, checker, filler))}\n")
            sys.stdout.flush()

    threading.stack_size(STACK_BYTES)
    asyncio.run(run())


def test_routers_and_workers_compile_the_deepest_grammars() -> None:
    command = [sys.executable, "-c", f"from {__name__} import compile_all; compile_all()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    answers = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (done.returncode, list(answers)) == (0, list(deep_grammars())), done.stderr
    assert {each for answer in answers.values() for each in answer.split()} <= {"accepted", "too_complex"}, answers


def test_a_deep_call_returns_and_raises_and_its_time_counts() -> None:
    def work() -> threading.Thread:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return call_deep(threading.current_thread)

    def fail() -> None:
        raise ConstraintFailed("no")

    began = cpu_s()
    thread = call_deep(work)
    assert isinstance(thread, DeepThread), "a call in a deep thread stays there"
    assert thread is not threading.current_thread()
    assert cpu_s() - began >= 0.02
    with pytest.raises(ConstraintFailed, match="no"):
        call_deep(fail)


def test_other_threads_keep_their_stacks() -> None:
    before = threading.stack_size()
    call_deep(threading.current_thread)
    assert threading.stack_size() == before
