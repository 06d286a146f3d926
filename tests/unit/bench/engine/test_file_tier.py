"""The replay of traces over a restart: what was in files is found, what was in memory is not."""

from __future__ import annotations

import pytest

from baton.settings.tiers import TierWrite
from bench.engine.tiers.file_tier import RestartShares, replay

PROMPT = tuple(range(4))


@pytest.mark.parametrize(
    ("write", "keeps", "tier", "written"),
    [
        (TierWrite.NONE, True, 0.0, 0.0),
        (TierWrite.BACK, True, 0.0, 0.0),
        (TierWrite.THROUGH, False, 0.0, 0.5),
        (TierWrite.THROUGH, True, 0.5, 0.25),
        (TierWrite.SELECTIVE, True, 0.5, 0.25),
    ],
)
def test_one_prompt_before_and_after_a_restart(write: TierWrite, keeps: bool, tier: float, written: float):
    """Four times the same four blocks in a pool of eight: only a restart takes them from the pool.

    Write-back copies nothing, as nothing is evicted.
    """
    found = replay([PROMPT] * 4, num_pages=8, num_slots=16, write=write, keeps=keeps)
    assert found == RestartShares(0.5, tier, 2 * tier, written)
