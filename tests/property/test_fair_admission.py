"""Fairness of the admission queue on a virtual clock: isolation, Jain's index, the bound of the queue, goodput."""

from __future__ import annotations

import itertools

import pytest

from baton.services.router.admission.slot import OUTPUT_CHARGE
from tests.property.tenant_world import Offer, TenantWorld, capacity, charge_rate, jain

PLACES = 16
RATE = capacity(PLACES, 100, 100)
STEADY = Offer("steady", rate=0.3 * RATE)
SECONDS = 120.0


def flooded(load: float, *, fifo: bool = False, seed: int = 0) -> TenantWorld:
    world = TenantWorld([STEADY, Offer("flood", rate=load * RATE)], PLACES, fifo=fifo, seed=seed)
    world.run(SECONDS)
    return world


def goodput(world: TenantWorld, objective_s: float = 13.3) -> float:
    """Charges of the answers whose first token came in time, between the start and the end of the flood."""
    return sum(
        charge
        for outcomes in world.outcomes.values()
        for ttft_s, at, charge in zip(outcomes.ttfts, outcomes.first_tokens_at, outcomes.charges, strict=True)
        if ttft_s <= objective_s and 10.0 <= at <= SECONDS
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_tenant_loses_nothing_to_a_flood(seed):
    fair, fifo = flooded(10.0, seed=seed), flooded(10.0, fifo=True, seed=seed)
    steady = fair.outcomes["steady"]
    assert steady.num_refused <= 0.01 * steady.num_sent
    assert sorted(steady.ttfts)[int(0.99 * len(steady.ttfts))] < 2.0
    assert fifo.outcomes["steady"].num_refused > 0.5 * steady.num_sent, "one queue for all would refuse it"


@pytest.mark.parametrize("seed", range(3))
def test_others_beyond_their_share_change_no_answer_of_mine(seed):
    answers = [flooded(load, seed=seed).outcomes["steady"].answers for load in (0.0, 2.0, 10.0)]
    assert answers[0] == answers[1] == answers[2]


def test_fairness_costs_no_goodput():
    """99 % of that of one queue for all, over four floods. `max_ttft_s` is three quarters of the objective."""
    fair = sum(goodput(flooded(10.0, seed=seed)) for seed in range(4))
    fifo = sum(goodput(flooded(10.0, fifo=True, seed=seed)) for seed in range(4))
    assert fair >= 0.99 * fifo


UNLIKE = [
    Offer("short", backlog=40, prompt_tokens=(10, 30), output_tokens=(20, 40)),
    Offer("long", backlog=40, prompt_tokens=(10, 30), output_tokens=(300, 500)),
    Offer("prompts", backlog=40, prompt_tokens=(800, 1200), output_tokens=(10, 30)),
    Offer("middle", backlog=40, prompt_tokens=(100, 200), output_tokens=(50, 150)),
]


@pytest.mark.parametrize("seed", range(3))
def test_unlike_tenants_that_all_wait_get_equal_service(seed):
    world = TenantWorld(UNLIKE, PLACES, max_ttft_s=1e9, seed=seed)
    world.run(240.0)
    served = {name: outcomes.served for name, outcomes in world.outcomes.items()}
    assert jain([history[-1] for history in served.values()]) >= 0.99
    longest_prompt, in_flight = 1200, PLACES * OUTPUT_CHARGE * 500
    bound = 2 * max(longest_prompt, in_flight)
    for one, other in itertools.combinations(served.values(), 2):
        gaps = [a - b for a, b in zip(one, other, strict=True)]
        assert max(gaps) - min(gaps) <= bound, "in any window"
    fifo = TenantWorld(UNLIKE, PLACES, max_ttft_s=1e9, fifo=True, seed=seed)
    fifo.run(240.0)
    answered = {name: outcomes.num_answered for name, outcomes in fifo.outcomes.items()}
    assert max(answered.values()) < 2 * min(answered.values()), "by requests, whatever they cost"


def test_service_follows_the_weights():
    offers = [Offer("light", backlog=40), Offer("heavy", backlog=40, weight=3.0)]
    world = TenantWorld(offers, PLACES, max_ttft_s=1e9)
    world.run(240.0)
    light, heavy = (world.outcomes[name].served[-1] for name in ("light", "heavy"))
    assert heavy / light == pytest.approx(3.0, rel=0.05)
    assert light + heavy == pytest.approx(240.0 * charge_rate(PLACES, 100, 100), rel=0.05), "and no place is idle"


def test_six_hundred_clients_are_not_refused_for_their_number():
    """600 at once are served in 75 s. All of them may wait as long."""
    world = TenantWorld([Offer("all", backlog=600)], PLACES, max_ttft_s=90.0)
    world.run(0.0)
    assert world.outcomes["all"].num_refused == 0
    assert 60.0 < max(world.outcomes["all"].ttfts) < 90.0


def test_a_tenant_that_slept_gets_its_share_and_no_more():
    """Alone for 100 s, then both want everything."""
    early, late = Offer("early", rate=3.0 * RATE), Offer("late", rate=3.0 * RATE)
    world = TenantWorld([early, late], PLACES)
    world.run(0.0)
    for offer, start in ((early, 0.0), (late, 100.0)):
        schedule(world, offer, start, 200.0)
    world.run(0.0)
    one, other = (world.outcomes[name] for name in ("early", "late"))
    served = [outcomes.served[-1] - outcomes.served[99] for outcomes in (one, other)]
    assert jain(served) >= 0.99


def schedule(world: TenantWorld, offer: Offer, start: float, end: float) -> None:
    """Adds arrivals and measurements from `start` to `end`."""
    num = int((end - start) * offer.rate)
    for n in range(num):
        world.arrive_at(start + n / offer.rate, offer, n)
    if start == 0.0:
        for second in range(1, int(end) + 1):
            world.measure_at(float(second))
