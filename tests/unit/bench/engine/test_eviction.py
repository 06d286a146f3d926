"""`bench.engine.eviction`: the shares of a small trace, computed by hand."""

from __future__ import annotations

import pytest

from baton.kv.eviction import EvictionPolicy
from bench.engine.eviction import cached_share, table

SHARED = [1, 2]
SCAN = [[10 + number] for number in range(4)]


@pytest.mark.parametrize(("policy", "share"), [("lru", 2 / 10), ("lfu", 4 / 10), ("slru", 4 / 10)])
def test_the_shares_of_a_scan_between_two_uses(policy: str, share: float):
    """Two blocks are used twice, four others pass through a pool of four, and the two are used again."""
    prompts = [SHARED, SHARED, *SCAN, SHARED]
    assert cached_share(prompts, 4, EvictionPolicy(policy)) == pytest.approx(share)


def test_a_prompt_larger_than_the_pool_is_not_cached():
    assert cached_share([[1, 2, 3], [1, 2, 3]], 2, EvictionPolicy.LRU) == 0.0


def test_every_block_that_comes_again_is_cached_with_room_for_all():
    lines = table([SHARED, SHARED], [1])
    assert lines[0].endswith("| all 2 |")
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["50.0% |"] * len(EvictionPolicy)
