"""Which cores are lent to whom, and the file that says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.settings.core_plan import MAX_WORKERS, SLOT_BYTES, SLOTS_BYTES, BadCorePlan, CorePlan

PLANS = st.dictionaries(
    st.text(min_size=1, max_size=5), st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=MAX_WORKERS
).map(CorePlan)


@given(PLANS)
def test_a_plan_is_read_as_it_was_written(plan: CorePlan):
    content = plan.as_bytes()
    assert CorePlan.from_bytes(content) == plan
    slots = [content[at : at + SLOT_BYTES] for at in range(0, SLOTS_BYTES, SLOT_BYTES)]
    assert {slot[:8] for slot in slots} == {(2**63 - 1).to_bytes(8, "little")}, "nobody has joined"


@given(PLANS)
def test_a_borrowed_core_is_none_of_its_own_and_has_all_its_owners(plan: CorePlan):
    for worker, own in plan.cores.items():
        borrowable = plan.borrowable(worker)
        assert not set(borrowable) & set(own)
        for core, owners in borrowable.items():
            named = {name for name in plan.cores if owners >> plan.slot(name) & 1}
            assert named == {name for name, cores in plan.cores.items() if core in cores}
            assert owners


def test_a_plan_of_too_many_workers_is_refused():
    with pytest.raises(BadCorePlan, match="at most 64"):
        CorePlan({str(number): (number,) for number in range(MAX_WORKERS + 1)})


@pytest.mark.parametrize("tail", [b"", b"[]", b'{"cores": {"a": 3}}', b'{"cores": {"a": ["x"]}}', b"\xff", b"null"])
def test_what_is_no_plan_is_refused(tail: bytes):
    with pytest.raises(BadCorePlan, match="not a plan"):
        CorePlan.from_bytes(bytes(SLOTS_BYTES) + tail)
