"""`tests/plugins/garbage.py`: this process collects garbage, but not among the tests and what they import."""

from __future__ import annotations

import gc

import pytest

from tests.plugins.garbage import YOUNG_OBJECTS


def test_collected_tests_are_exempt_and_garbage_is_collected(request: pytest.FixtureRequest) -> None:
    assert gc.isenabled()
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    assert gc.get_freeze_count() > len(request.session.items)
    assert not any(thing is request.node for thing in gc.get_objects())
