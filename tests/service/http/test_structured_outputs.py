"""Constraints over HTTP: what a wrong one answers, before anything is admitted, and what reaches the dispatcher."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from baton.domain.constraint import Constraint, GrammarPhase
from baton.grammar.compiler import GrammarCompiler
from baton.services.router.openai.constraint import checker
from tests.fake_dispatcher import one_token_chunks
from tests.service.http.http_server import TIMEOUT_S, router, says, tokens_of

TEXT = '{"a": 1}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("chat", [True, False])
async def test_every_choice_has_the_constraint(chat: bool):
    seen = []

    def script(sequence: Any) -> Any:
        seen.append(sequence)
        return one_token_chunks(tokens_of(TEXT))

    async with router(script) as world:
        send = world.chat if chat else world.complete
        answer = await send(response_format=WRAPPED, n=2, ignore_eos=True, min_tokens=3)
        assert answer.status_code == 200
        plain = await send()
        assert plain.status_code == 200
    first, second, without = seen
    assert first.constraint == second.constraint
    assert isinstance(first.constraint.phases[0], GrammarPhase)
    assert (first.constraint.ignore_eos, first.constraint.min_tokens, first.stop.min_tokens) == (True, 3, 0)
    assert first.constraint.eos <= first.stop.stop_token_ids, "a complete text ends, whatever else was asked for"
    assert without.constraint is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {**WRAPPED, "json_schema": {"schema": {"not": {}}}}}, "response_format", "not"),
        ({"guided_regex": "(["}, "guided_regex", "regex"),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs", "regex"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar", "nobody"),
        ({"json_schema": {"type": "array", "items": {"uniqueItems": True}}}, "json_schema", "/items"),
        ({"structured_outputs": {"disable_any_whitespace": True}, "regex": "(["}, "regex", "regex"),
        ({"structured_outputs": {"json": {"enum": ["x" * 70_000]}}}, "structured_outputs", "bytes"),
    ],
)
async def test_a_constraint_that_cannot_be_kept_is_refused(fields: dict[str, Any], param: str, words: str):
    """Twice: the second time from memory."""
    async with router(says(TEXT)) as world:
        for _ in range(2):
            answer = await world.chat(**fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
            assert error["code"] == "constraint_failed"
            assert words in error["message"]
        assert not world.dispatcher.admitted


async def test_too_many_checks_at_once_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checker, "MAX_WAITING", 0)
    monkeypatch.setattr(checker, "MAX_RUNNING", 1)
    async with router(says(TEXT)) as world:
        answers = await asyncio.gather(*(world.chat(guided_regex=f"a{{{n}}}") for n in range(1, 9)))
    codes = {answer.status_code for answer in answers}
    assert codes <= {200, 429}
    assert 200 in codes
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)


async def test_a_check_that_overruns_its_time_holds_up_no_other(monkeypatch: pytest.MonkeyPatch):
    """The library may compile for minutes, and its thread cannot be stopped."""
    release, patterns = threading.Event(), list[str]()
    check = GrammarCompiler.check

    def slow(compiler: GrammarCompiler, constraint: Constraint) -> None:
        patterns.extend(text for text in constraint.grammars if "hostile" in text)
        while any("hostile" in text for text in constraint.grammars) and not release.is_set():
            pass
        check(compiler, constraint)

    monkeypatch.setattr(GrammarCompiler, "check", slow)
    monkeypatch.setattr(checker, "MAX_CHECK_S", 0.02)
    monkeypatch.setattr(checker, "MAX_LEFT", 2)
    monkeypatch.setattr(checker, "POLL_S", 0.001)
    async with router(says(TEXT)) as world:
        try:
            for _ in range(2):
                refused = await world.chat(guided_regex="hostile")
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
                assert "too complex" in refused.json()["error"]["message"]
            assert len(patterns) == 1, "an equal one is refused from memory"
            monkeypatch.setattr(checker, "MAX_CHECK_S", 60.0)
            assert (await world.chat(guided_regex="a+")).status_code == 200
            monkeypatch.setattr(checker, "MAX_LEFT", 1)
            assert (await world.chat(guided_regex="b+")).status_code == 429
        finally:
            release.set()
        async with asyncio.timeout(TIMEOUT_S):
            while (await world.chat(guided_regex="hostile")).status_code != 200:
                pass


async def test_two_forms_at_once_are_refused():
    async with router(says(TEXT)) as world:
        answer = await world.chat(response_format={"type": "json_object"}, guided_choice=["a"])
        assert answer.status_code == 400
        same = await world.chat(guided_regex="a+", regex="a+")
        assert same.status_code == 200
        other = await world.chat(guided_regex="a+", regex="b+")
        assert other.json()["error"]["message"].startswith("regex: contradicts guided_regex")
