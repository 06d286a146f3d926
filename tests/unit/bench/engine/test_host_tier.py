"""The replay of traces over a host tier: what the pool evicts is found there, as far as it was written."""

from __future__ import annotations

import pytest

from baton.settings.tiers import TierWrite
from bench.engine.tiers.host_tier import TierShares, replay

FIRST, SECOND = tuple(range(4)), tuple(range(10, 14))


@pytest.mark.parametrize(
    ("write", "host", "written"),
    [
        (TierWrite.NONE, 0.0, 0.0),
        (TierWrite.SELECTIVE, 0.0, 0.0),
        (TierWrite.BACK, 0.5, 0.5),
        (TierWrite.THROUGH, 0.5, 0.5),
    ],
)
def test_two_prompts_that_evict_each_other(write: TierWrite, host: float, written: float):
    """The pool has room for one. `selective` sees no second use: pages are gone by then."""
    found = replay([FIRST, SECOND, FIRST, SECOND], num_pages=4, num_slots=16, write=write)
    assert found == TierShares(0.0, host, written)
