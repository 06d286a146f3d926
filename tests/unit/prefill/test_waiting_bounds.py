"""No prompt starves, whatever arrives: the bounds of `baton.services.prefill.policy`, in tiny worlds, for each
policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.arithmetic import ceil_div
from baton.engine.handoff.export_events import Seal
from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, REPEATABLE_SETTINGS, assert_idle, engine_request, tiny_prefill

SHARES = {0.0: 1, 0.25: 1, 0.5: 2, 1.0: 4}
"""Share of a budget of four pages, and the pages that it guarantees."""
MAX_STEPS = 100


@dataclass
class Arrival:
    """A prompt that comes before a step."""

    prompt: list[int]
    step: int
    priority: int = 0
    ended: int = MAX_STEPS


ARRIVALS = st.lists(
    st.builds(
        Arrival, st.lists(st.integers(0, 1), min_size=1, max_size=4 * PAGE_SIZE), st.integers(0, 9), st.integers(-3, 3)
    ),
    min_size=1,
    max_size=20,
)


def run(arrivals: list[Arrival], order: PolicySettings, threshold: int = 0, salts: int = 1000) -> int:
    """Runs all prompts; sets the steps in which they end. Pages are never missing: two prompts begin at a time.

    Returns the number of tokens computed.
    """
    num_tokens = 0
    world = tiny_prefill(9.0, 4 * PAGE_SIZE, NUM_PAGES, 1, long_prompt_tokens=threshold, order=order)
    for now in range(MAX_STEPS):
        for number, one in enumerate(arrivals):
            if one.step == now:
                salt = str(number % salts)
                request = engine_request(f"r{number}", one.prompt, salt=salt, priority=one.priority)
                world.scheduler.add(request, 0, 999.0, float(now))
        batch = world.scheduler.schedule(float(now))
        if batch is None:
            continue
        num_tokens += batch.num_tokens
        for effect in world.scheduler.commit(batch, world.runner.run(batch), float(now)):
            if isinstance(effect, Seal):
                arrivals[int(effect.id.request_id[1:])].ended = now
                assert world.exports.commit(effect.id)
    assert_idle(world.cache)
    return num_tokens


@pytest.mark.parametrize("policy", PrefillPolicy)
@given(
    arrivals=ARRIVALS,
    share=st.sampled_from(list(SHARES)),
    threshold=st.sampled_from([0, PAGE_SIZE]),
    by_priority=st.booleans(),
)
@REPEATABLE_SETTINGS
def test_every_prompt_ends_in_time(
    policy: PrefillPolicy, arrivals: list[Arrival], share: float, threshold: int, by_priority: bool
):
    """Also one of low priority, among any others."""
    arrivals = [replace(one) for one in sorted(arrivals, key=lambda one: one.step)]
    run(arrivals, PolicySettings(policy, share, ttft_objective_s=3.0, by_priority=by_priority), threshold)
    guaranteed = SHARES[share] * PAGE_SIZE
    for number, one in enumerate(arrivals):
        older = [other for other in arrivals[:number] if other.ended >= one.step]
        bound = sum(ceil_div(len(other.prompt), guaranteed) for other in [*older, one])
        assert one.ended - one.step < bound, f"prompt {number} of {len(arrivals)} ends beyond its bound"


@pytest.mark.parametrize("policy", PrefillPolicy)
@given(arrivals=ARRIVALS, share=st.sampled_from(list(SHARES)))
@REPEATABLE_SETTINGS
def test_waiting_for_shared_pages_ends(policy: PrefillPolicy, arrivals: list[Arrival], share: float):
    """A page that is waited for is one of the prompt's own, so only the cut into chunks may cost steps."""
    arrivals = [replace(one) for one in sorted(arrivals, key=lambda one: one.step)]
    run(arrivals, PolicySettings(policy, share, ttft_objective_s=3.0), salts=1)
    guaranteed = SHARES[share] * PAGE_SIZE
    for number, one in enumerate(arrivals):
        older = [other for other in arrivals[:number] if other.ended >= one.step]
        bound = sum(ceil_div(len(other.prompt), guaranteed) + 1 for other in [*older, one])
        assert one.ended - one.step < bound, f"prompt {number} of {len(arrivals)} ends beyond its bound"


@pytest.mark.parametrize("policy", PrefillPolicy)
@given(prompts=st.lists(st.integers(0, 1), min_size=4 * PAGE_SIZE, max_size=4 * PAGE_SIZE), copies=st.integers(2, 4))
@REPEATABLE_SETTINGS
def test_copies_compute_their_last_page_only(policy: PrefillPolicy, prompts: list[int], copies: int):
    """Equal prompts that come together cost one, and the last page of each other: its end is sampled from."""
    num_tokens = run([Arrival(prompts, 0) for _ in range(copies)], PolicySettings(policy))
    assert num_tokens == copies * len(prompts), "other salts share nothing"
    num_tokens = run([Arrival(prompts, 0) for _ in range(copies)], PolicySettings(policy), salts=1)
    assert num_tokens == len(prompts) + (copies - 1) * PAGE_SIZE
