"""`baton run`: one message, or a chat from standard input."""

from __future__ import annotations

import io

import pytest

from baton.services.cli.main import run


def test_one_message_is_answered(capsys: pytest.CaptureFixture[str]):
    assert run(["run", "bundled", "What is 3 + 4?", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "3 + 4 = 7.\n"


def test_messages_are_read_until_the_input_ends(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 + 4?\n\nWhat is 2 + 2?\n"))
    assert run(["run", "--temperature", "0", "--max-tokens", "40"]) == 0
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 2
    assert answers[0] == "3 + 4 = 7."


def test_a_missing_model_is_refused_with_a_reason(capsys: pytest.CaptureFixture[str]):
    assert run(["run", "/nowhere", "hello"]) != 0
    assert "/nowhere" in capsys.readouterr().err
