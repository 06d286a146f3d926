"""Host memory slots: all or none, and never freed twice."""

from __future__ import annotations

import pytest

from baton.domain.errors import Broken
from baton.kv.swap_space import SwapSpace


def test_all_or_none():
    host = SwapSpace(3)
    two = host.allocate(2)
    assert two is not None
    assert host.allocate(2) is None
    assert host.num_free == 1
    host.free(two)
    assert host.num_free == 3


@pytest.mark.parametrize("slots", [(0,), (3,), (-1,)])
def test_a_slot_that_is_not_allocated_cannot_be_freed(slots: tuple[int, ...]):
    with pytest.raises(Broken, match="not allocated"):
        SwapSpace(3).free(slots)


def test_a_slot_cannot_be_freed_twice_in_one_call():
    host = SwapSpace(3)
    taken = host.allocate(2)
    assert taken is not None
    with pytest.raises(Broken, match="not allocated"):
        host.free((taken[0], taken[0]))
    assert host.num_free == 1
