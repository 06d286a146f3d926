"""A prefill and a decode side together: clients get the model's tokens, and every page is freed."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machines.split_machine import SplitMachine
from tests.tiny_workers import REPEATABLE_SETTINGS


def test_split_pair():
    """Checks as well that pages moved and that V1 and V3 validated imports (V2: see `test_leases`)."""
    num_bytes = 0
    num_proven_by: Counter[str] = Counter()

    class Counting(SplitMachine):
        def teardown(self) -> None:
            nonlocal num_bytes
            super().teardown()
            num_bytes += self.num_bytes_moved
            num_proven_by.update(self.num_proven_by)

    run_state_machine_as_test(Counting, settings=settings(REPEATABLE_SETTINGS, max_examples=120))
    assert num_bytes > 0, "nothing was ever handed over"
    assert num_proven_by.keys() >= {"v1", "v3"}
