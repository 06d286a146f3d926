"""Draws images, encode workers and their faults for some scenarios. Called by `scenario_generator`.

The draws are apart from all others: a scenario without images is what it was without this module.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from simulation.scenario import (
    BEGIN_S,
    END_S,
    STORE,
    ClientPlan,
    FaultPlan,
    ImagePlan,
    Scenario,
    SimFaultKind,
)

IMAGES_SHARE = 0.3
"""Of the scenarios with prefill workers."""

ROUTER_SEEDS = (2, 4, 8)
"""Last digits of the seeds that mostly fail routers. The first hundred have text only: planted bugs are found there."""

CLIENT_SHARE = 0.6
"""Of the clients of such a scenario: those with images."""

IMAGES = ((0, 2), (1, 3), (2, 1), (3, 2))
"""Number and rows of every image. Two are of equal size."""

MAX_PROMPT = 4
"""Tokens of text beside images: pools are small."""

FAULTS = (SimFaultKind.KILL, SimFaultKind.FREEZE, SimFaultKind.HANG, SimFaultKind.DRAIN, SimFaultKind.ROT)
LINK_FAULTS = (SimFaultKind.CUT, SimFaultKind.CUT_ONE_WAY, SimFaultKind.SLOW)
MAX_FAULT_S = 3.0
MAX_DRAIN_S = 1.0


def with_images(rng: Random, scenario: Scenario) -> Scenario:
    """The scenario with images, or as it is."""
    is_kept = scenario.seed < 100 and scenario.seed % 10 in ROUTER_SEEDS
    if rng.random() >= IMAGES_SHARE or not scenario.num_prefills or is_kept:
        return scenario
    num_encoders = rng.choice([0, 1, 1, 2, 2])
    is_quiet, only_drains = scenario.seed % 10 == 0, scenario.seed % 10 == 5
    towers = num_encoders == 0 or only_drains or rng.random() < 0.5
    scenario = replace(
        scenario,
        images=True,
        num_encoders=num_encoders,
        towers=towers,
        media_bytes=rng.choice([64, 1024]),
        clients=tuple(_with_images(rng, plan) for plan in scenario.clients),
    )
    if not is_quiet and not only_drains:
        corruption = rng.choice([0.0, rng.uniform(0.1, 0.5)])
        scenario = replace(scenario, noise=replace(scenario.noise, embedding_corruption=corruption))
    if is_quiet or not num_encoders:
        return scenario
    draw = _drain if only_drains else _fault
    more = tuple(draw(rng, scenario) for _ in range(rng.randint(1, 3)))
    return replace(scenario, faults=(*scenario.faults, *more))


def _with_images(rng: Random, plan: ClientPlan) -> ClientPlan:
    """A client's plan with one or two images among less text. Rows of images have no scores."""
    if rng.random() >= CLIENT_SHARE:
        return plan
    prompt = plan.prompt[-MAX_PROMPT:]
    places = sorted(rng.randint(0, len(prompt)) for _ in range(rng.choice([1, 1, 2])))
    images = tuple(ImagePlan(at, *rng.choice(IMAGES)) for at in places)
    return replace(plan, prompt=prompt, images=images, prompt_logprobs=None)


def _drain(rng: Random, scenario: Scenario) -> FaultPlan:
    return FaultPlan(
        SimFaultKind.DRAIN, rng.uniform(BEGIN_S, END_S), rng.uniform(0.05, MAX_DRAIN_S), rng.choice(scenario.encoders)
    )


def _fault(rng: Random, scenario: Scenario) -> FaultPlan:
    encoder, at_s = rng.choice(scenario.encoders), rng.uniform(BEGIN_S, END_S)
    if rng.random() < 0.7:
        kind = rng.choice(FAULTS)
        longest_s = MAX_DRAIN_S if kind is SimFaultKind.DRAIN else MAX_FAULT_S
        return FaultPlan(kind, at_s, rng.uniform(0.05, longest_s), encoder)
    ends = [encoder, rng.choice([*scenario.routers, *scenario.prefills, STORE])]
    rng.shuffle(ends)
    return FaultPlan(rng.choice(LINK_FAULTS), at_s, rng.uniform(0.05, MAX_FAULT_S), *ends)
