"""Caches whose window parts have slots of their own read each other's pages: no wrong page, no leak of a slot."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machines.page_sharing_machine import PageSharingMachine
from tests.tiny_workers import REPEATABLE_SETTINGS


@pytest.mark.parametrize("num_slots", [2, 4, 8])
def test_page_sharing(num_slots: int):
    num_leading = num_evicted = 0

    class Windowed(PageSharingMachine):
        num_window_slots = num_slots

        def teardown(self) -> None:
            nonlocal num_leading, num_evicted
            super().teardown()
            num_leading += self.num_leading
            windows = self.taker.cache.pool.windows
            assert windows is not None
            num_evicted += windows.num_evicted

    run_state_machine_as_test(Windowed, settings=settings(REPEATABLE_SETTINGS, max_examples=80))
    assert num_leading, "pages came without their window parts"
    assert num_evicted or num_slots == 8
