"""A prefill side and a decode side together: the client's tokens are the model's, and every page comes back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.split_machine import SplitMachine
from tests.worlds import REPRODUCIBLE


def test_split_pair():
    moved: list[int] = []

    class Counting(SplitMachine):
        def teardown(self) -> None:
            super().teardown()
            moved.append(self.num_bytes_moved)

    run_state_machine_as_test(Counting, settings=settings(REPRODUCIBLE, max_examples=80))
    assert sum(moved) > 0, "nothing was ever handed over"
