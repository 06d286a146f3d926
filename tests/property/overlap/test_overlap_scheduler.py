"""Overlap scheduling changes neither tokens nor finish reasons, and no page is reused under a step in flight."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from baton.services.decode.rows.order import RowOrder
from tests.property.overlap.overlap_machine import DecodeDigestingMachine, OverlapMachine
from tests.tiny_workers import REPEATABLE_SETTINGS


class OverlapPriorityMachine(OverlapMachine):
    """Rows of low priority give way, in the middle of the batch."""

    order = RowOrder(by_priority=True)


class DigestingPriorityMachine(DecodeDigestingMachine):
    """Rows of low priority give way while pages are hashed."""

    order = RowOrder(by_priority=True)


@pytest.mark.parametrize("machine", [OverlapMachine, OverlapPriorityMachine])
def test_decode_side_with_a_step_in_flight(machine: type[OverlapMachine]):
    machine.num_ahead = 0
    run_state_machine_as_test(machine, settings=settings(REPEATABLE_SETTINGS, max_examples=100, stateful_step_count=60))
    assert machine.num_ahead > 100


@pytest.mark.parametrize("machine", [DecodeDigestingMachine, DigestingPriorityMachine])
def test_decode_side_whose_pages_are_hashed_beside(machine: type[DecodeDigestingMachine]):
    machine.num_late = machine.num_kept = 0
    run_state_machine_as_test(machine, settings=settings(REPEATABLE_SETTINGS, max_examples=60, stateful_step_count=40))
    assert machine.num_late > 100
    assert machine.num_kept > 10
