"""Token buckets at every reading of the clock: a full bucket gives all that it has, and not more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.store.tenants.tenant_store import RateTake
from baton.store.tenants.token_buckets import TokenBuckets

LONG_UP_S = 33_000.1


@given(st.floats(0.0, 1e9), st.floats(0.5, 1e6))
def test_a_full_bucket_gives_all_that_it_has_at_once(now: float, per_minute: float) -> None:
    assert TokenBuckets().take([RateTake("b", per_minute, per_minute)], now) == 0.0
    assert TokenBuckets().take([RateTake("b", 2 * per_minute, per_minute)], now) == 0.0


@pytest.mark.parametrize("now", [0.0, LONG_UP_S, 1e9 + 1 / 3])
def test_an_empty_bucket_waits_for_its_refill(now: float) -> None:
    buckets = TokenBuckets()
    assert buckets.take([RateTake("b", 60.0, 60.0)], now) == 0.0
    assert buckets.take([RateTake("b", 1.0, 60.0)], now) == pytest.approx(1.0, abs=1e-5)
    assert buckets.take([RateTake("b", 1.0, 60.0)], now + 1.00001) == 0.0
