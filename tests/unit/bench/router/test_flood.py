"""Figures of the flood experiment."""

from __future__ import annotations

import pytest

from bench.router.flood import TenantLoad, jain
from bench.router.overload import CAPACITY


def test_jain_is_one_for_equal_services_and_one_nth_for_a_single_winner():
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)


def test_a_plan_offers_the_load_and_depends_on_its_tenant_alone():
    load = TenantLoad("steady", 0.5)
    plan = load.plan(60.0, seed=1)
    assert len(plan) == int(0.5 * 60.0 * CAPACITY.rate(load.num_tokens))
    assert plan == TenantLoad("steady", 0.5).plan(60.0, seed=1)
    assert plan[0].prompt != TenantLoad("flood", 0.5).plan(60.0, seed=1)[0].prompt
