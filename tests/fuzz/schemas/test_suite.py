"""The JSON Schema Test Suite, draft 2020-12: nothing is ignored in silence, and what is supported is kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.fuzz.schemas.suite import SuiteReport, names_a_reason, report

SUITE = Path(sys.executable).parent.parent / "share" / "schema-suite"


@pytest.fixture(scope="module")
def played() -> SuiteReport:
    if not (SUITE / "lock").exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no suite: `make schema-suite` fetches it")
    return report(SUITE / "tests" / "draft2020-12")


def test_every_completed_text_validates(played: SuiteReport):
    assert played.invalid == []
    assert played.counts["complete texts"] > 250


def test_no_instance_that_the_suite_calls_invalid_is_accepted(played: SuiteReport):
    assert played.accepted == []
    assert played.counts["invalid"] > 200


def test_most_valid_instances_are_accepted(played: SuiteReport):
    """Not all: properties come in the schema's order, and numbers in their usual form."""
    assert played.counts["valid and accepted"] > 0.9 * played.counts["valid"]


def test_a_refused_schema_names_its_keyword(played: SuiteReport):
    assert played.unnamed == []
    assert played.counts["refused"] < 200


def test_a_message_without_a_keyword_names_nothing():
    assert names_a_reason({"not": {}}, 'Unimplemented keys: ["not"] at /')
    assert not names_a_reason({"not": {}}, "the grammar cannot be used")
