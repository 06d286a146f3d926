"""No prompt starves, whatever arrives: the bound B1 of `services.prefill.policy`, in tiny worlds, for each policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.arithmetic import ceil_div
from services.prefill.policy import PolicySettings, PrefillPolicy
from services.prefill.scheduler import Seal
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, REPEATABLE_SETTINGS, assert_idle, engine_request, tiny_prefill

SHARES = {0.0: 1, 0.25: 1, 0.5: 2, 1.0: 4}
"""Share of a budget of four pages, and the pages that it guarantees."""
MAX_STEPS = 100


@dataclass
class Arrival:
    """A prompt that comes before a step."""

    prompt: list[int]
    step: int
    ended: int = MAX_STEPS


ARRIVALS = st.lists(
    st.builds(Arrival, st.lists(st.integers(0, 1), min_size=1, max_size=4 * PAGE_SIZE), st.integers(0, 9)),
    min_size=1,
    max_size=20,
)


def run(arrivals: list[Arrival], order: PolicySettings, threshold: int) -> None:
    """Runs all prompts; sets the steps in which they end. Pages are never missing: two prompts begin at a time."""
    world = tiny_prefill(9.0, 4 * PAGE_SIZE, NUM_PAGES, 1, long_prompt_tokens=threshold, order=order)
    for now in range(MAX_STEPS):
        for number, one in enumerate(arrivals):
            if one.step == now:
                world.scheduler.add(engine_request(f"r{number}", one.prompt, salt=str(number)), 0, 999.0, float(now))
        batch = world.scheduler.schedule(float(now))
        if batch is None:
            continue
        for effect in world.scheduler.commit(batch, world.runner.run(batch), float(now)):
            if isinstance(effect, Seal):
                arrivals[int(effect.id.request_id[1:])].ended = now
                assert world.exports.commit(effect.id)
    assert_idle(world.cache)


@pytest.mark.parametrize("policy", PrefillPolicy)
@given(arrivals=ARRIVALS, share=st.sampled_from(list(SHARES)), threshold=st.sampled_from([0, PAGE_SIZE]))
@REPEATABLE_SETTINGS
def test_every_prompt_ends_in_time(policy: PrefillPolicy, arrivals: list[Arrival], share: float, threshold: int):
    arrivals = [replace(one) for one in sorted(arrivals, key=lambda one: one.step)]
    run(arrivals, PolicySettings(policy, share, ttft_objective_s=3.0), threshold)
    guaranteed = SHARES[share] * PAGE_SIZE
    for number, one in enumerate(arrivals):
        older = [other for other in arrivals[:number] if other.ended >= one.step]
        bound = sum(ceil_div(len(other.prompt), guaranteed) for other in [*older, one])
        assert one.ended - one.step < bound, f"prompt {number} of {len(arrivals)} ends beyond its bound"
