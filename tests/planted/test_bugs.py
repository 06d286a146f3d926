"""Every planted bug still has its place in the code, and the runner tells noticed from unnoticed."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planted.bugs import BUGS
from tests.planted.runner import ROOT, TIMEOUT_S, PlantedBug, run_bug

MIN_BUGS = 5
"""Least number of bugs a promise."""


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_applies_and_its_tests_exist(bug: PlantedBug):
    assert bug.plant() != (ROOT / bug.file).read_text(encoding="utf-8")
    for test in bug.tests.split():
        assert (ROOT / test.partition("::")[0]).exists(), test


def test_every_promise_has_several_bugs():
    assert min(Counter(bug.promise for bug in BUGS).values()) >= MIN_BUGS


def test_names_are_unique():
    assert len({str(bug) for bug in BUGS}) == len(BUGS)


HARMLESS = PlantedBug(
    "none", "a comment", "baton/domain/arithmetic.py", '"""', "# harmless", "tests/unit/domain/test_fingerprint.py"
)


def test_a_change_without_effect_is_reported_as_unnoticed():
    docstring = (ROOT / "baton/domain/arithmetic.py").read_text(encoding="utf-8").splitlines()[0]
    harmless = replace(HARMLESS, before=docstring, after='"""Another text."""')
    assert run_bug(harmless).problem == "no test noticed"


@pytest.mark.parametrize(("script", "problem"), [("echo wrong >&2; exit 1", "wrong"), ("exec sleep 5", "not within")])
def test_kernels_that_are_not_built_are_a_problem(
    script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "g++").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("tests.planted.runner.TIMEOUT_S", 0.5 if "sleep" in script else TIMEOUT_S)
    file = "baton/model/kernels/src/cpu_level.cpp"
    first = (ROOT / file).read_text(encoding="utf-8").splitlines()[0]
    result = run_bug(replace(HARMLESS, file=file, before=first, after="("))
    assert result.problem.startswith("the kernels were not built: ")
    assert problem in result.problem


def test_a_change_that_breaks_the_run_is_no_success():
    docstring = (ROOT / "baton/domain/fingerprint.py").read_text(encoding="utf-8").splitlines()[0]
    broken = replace(HARMLESS, file="baton/domain/fingerprint.py", before=docstring, after="(")
    assert "did not run" in run_bug(broken).problem
