"""Every planted bug still has its place in the code, and the runner tells noticed from unnoticed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.planted.bugs import BUGS
from tests.planted.runner import ROOT, PlantedBug, run_bug

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


def test_a_change_that_breaks_the_run_is_no_success():
    docstring = (ROOT / "baton/domain/fingerprint.py").read_text(encoding="utf-8").splitlines()[0]
    broken = replace(HARMLESS, file="baton/domain/fingerprint.py", before=docstring, after="(")
    assert "did not run" in run_bug(broken).problem
