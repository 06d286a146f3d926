"""Draws the scenario of a seed. A run itself knows only the scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from baton.domain.ids import RequestId
from baton.kv.eviction import EvictionPolicy
from baton.kv.growth import GrowthPolicy
from baton.services.prefill.policy import PrefillPolicy
from baton.settings.tiers import TierWrite
from simulation.image_scenarios import with_images
from simulation.scenario import (
    BEGIN_S,
    END_S,
    MAX_CHOICES,
    MAX_PARTITION_S,
    STORE,
    VOCAB_SIZE,
    ClientPlan,
    FaultPlan,
    Noise,
    Scenario,
    SimFaultKind,
)
from simulation.scheduling_plan import SchedulingPlan, draw_scheduling

MAX_FAULT_S = 3.0
OWNER_TTL_S = 1.5
"""Lease of a router, as in `policies`, which imports the product."""
ROUTER_SEEDS = (2, 4, 8)
"""Last digits of the seeds that mostly fail routers: workers differ less in them."""
GIVING_SHARE = 0.5
"""Of the scenarios with digests: those in which workers give cached pages to each other."""
SESSIONS_SHARE = 0.5
"""Of the scenarios: those in which routers and workers talk in sessions, and, drawn apart, those in which workers do so
with each other; in the others in calls."""
PORTS_SHARE = 0.5
"""Of the scenarios: those in which workers have ports of sessions; in the others gRPC carries all sessions."""
FITS_SHARE = 0.5
"""Of the scenarios that do not mostly fail routers: those in which workers announce step-time fits."""
TENANTS = ("", "", "a", "b")
"""Whose keys the clients have, in half of the scenarios that do not mostly fail routers."""
WINDOWS_SHARE = 0.3
"""Of the scenarios: those in which layers have a window, whose parts of pages lie in slots."""
MAX_RESTART_S = 1.0
"""Longest between a drained process's end and its restart: shorter than a request's patience for workers."""

Draw = Callable[[Random, Scenario], FaultPlan]

WORKER_FAULTS = (SimFaultKind.KILL, SimFaultKind.FREEZE, SimFaultKind.HANG, SimFaultKind.DRAIN)
ROUTER_FAULTS = (SimFaultKind.KILL, SimFaultKind.FREEZE, SimFaultKind.DRAIN)
STORE_FAULTS = (SimFaultKind.KILL, SimFaultKind.FREEZE)
STORE_LOSSES = (SimFaultKind.WIPE, SimFaultKind.ROLL_BACK)
GROWTH_MODES = tuple(GrowthPolicy)
REGEXES = ("[01]+", "0(10){1,3}", "(00|1){2,5}", "101")
"""Of constrained answers: a digit a token."""

LINK_FAULTS = (SimFaultKind.CUT, SimFaultKind.CUT_ONE_WAY, SimFaultKind.SLOW)
MAX_BUDGET_CHANGES = 3
MAX_DURATION_S = {
    SimFaultKind.BUDGETS: MAX_RESTART_S,
    SimFaultKind.DRAIN: MAX_RESTART_S,
    SimFaultKind.UPGRADE: MAX_RESTART_S,
    SimFaultKind.FREEZE: MAX_PARTITION_S,
    SimFaultKind.CUT: MAX_PARTITION_S,
    SimFaultKind.CUT_ONE_WAY: MAX_PARTITION_S,
}


def generate_scenario(seed: int) -> Scenario:
    """Of ten seeds, one is undisturbed, one only drains processes and changes budgets, one begins with a burst, three
    mostly fail routers and their links to the store during long answers (in two of them the store also loses data), one
    upgrades all workers, and in one the workers' memory rots. In half of them decode workers have a drafter, in some
    there are images and encode workers."""
    scenario = _scenario(seed)
    match seed % 10:
        case 3:
            scenario = replace(scenario, digests=True)
            more = _rotting(Random(f"rot {seed}"), scenario)
        case 4 | 8:
            more = _losses(Random(f"losses {seed}"), scenario)
        case 6:
            more = _rollout(Random(f"rollout {seed}"), scenario)
        case _:
            more = []
    eviction = _eviction(seed)
    order = Random(f"order {seed}")
    drafts = Random(f"drafts {seed}").random() < 0.5
    scenario = replace(
        scenario,
        faults=(*scenario.faults, *more, *_budget_changes(Random(f"budgets {seed}"), scenario)),
        clients=tuple(_with_limits(Random(f"limits {seed} {plan.name}"), plan) for plan in scenario.clients),
        eviction=eviction,
        prefill_policy=order.choice(list(PrefillPolicy)),
        max_overtakes=order.choice([1, 64]),
        gives_pages=scenario.digests and Random(f"pages {seed}").random() < GIVING_SHARE,
        drafts=drafts,
        draft_trees=drafts and Random(f"draft trees {seed}").random() < 0.5,
        sessions=Random(f"sessions {seed}").random() < SESSIONS_SHARE,
        link_sessions=Random(f"link sessions {seed}").random() < SESSIONS_SHARE,
        session_ports=Random(f"ports of sessions {seed}").random() < PORTS_SHARE,
        host_write=_host_write(Random(f"host tier {seed}"), scenario),
        fits=seed % 10 not in ROUTER_SEEDS and Random(f"fits {seed}").random() < FITS_SHARE,
        equal_steps=seed % 10 not in ROUTER_SEEDS and Random(f"equal steps {seed}").random() < 0.5,
    )
    windows = Random(f"windows {seed}")
    if windows.random() < WINDOWS_SHARE:  # layers with a window have no trees
        scenario = replace(scenario, num_window_slots=windows.randint(5, 12), draft_trees=False)
    scenario = _with_tenants(Random(f"tenants {seed}"), with_images(Random(f"images {seed}"), scenario))
    return scenario if scenario.images or seed % 10 in ROUTER_SEEDS else _with_scheduling(scenario)


def _with_tenants(rng: Random, scenario: Scenario) -> Scenario:
    if scenario.seed % 10 in ROUTER_SEEDS or rng.random() < 0.5:
        return scenario
    clients = tuple(replace(plan, tenant=rng.choice(TENANTS)) for plan in scenario.clients)
    return replace(scenario, clients=clients)


def _with_scheduling(scenario: Scenario) -> Scenario:
    """Draws the other settings of schedulers and caches, and prompts that come again where there are tiers."""
    seed = scenario.seed
    scheduling = draw_scheduling(Random(f"scheduling {seed}"), digests=scenario.digests)
    has_tiers = scenario.host_write is not None or scheduling.file_write is not None
    repeated = _repeated_prompts(seed) if has_tiers else ()
    clients = tuple(_scheduled(plan, seed, scheduling, repeated) for plan in scenario.clients)
    return replace(scenario, clients=clients, scheduling=scheduling)


def _scheduled(
    plan: ClientPlan, seed: int, scheduling: SchedulingPlan, repeated: Sequence[tuple[int, ...]]
) -> ClientPlan:
    rng = Random(f"priority {seed} {plan.name}")
    if scheduling.by_priority:
        plan = replace(plan, priority=rng.choice([-1, 0, 0, 2]))
    return replace(plan, prompt=rng.choice(repeated)) if repeated and rng.random() < 0.75 else plan


def _repeated_prompts(seed: int) -> tuple[tuple[int, ...], ...]:
    """A few long prompts, which most clients of a cluster with tiers send: together more than a pool has."""
    rng = Random(f"prompts {seed}")
    return tuple(tuple(_tokens(rng, rng.randint(8, 12))) for _ in range(3))


def _eviction(seed: int) -> EvictionPolicy:
    """Any; in seeds that mostly fail routers the choice of earlier versions, on which planted bugs are found."""
    rng = Random(f"eviction {seed}")
    eviction = rng.choice([EvictionPolicy.LRU, EvictionPolicy.LFU, EvictionPolicy.SLRU])
    return EvictionPolicy.PRIORITY if seed % 10 not in ROUTER_SEEDS and rng.random() < 0.25 else eviction


def _host_write(rng: Random, scenario: Scenario) -> TierWrite | None:
    """Half of the scenarios with digests have host tiers; a copy needs a digest."""
    is_drawn = scenario.digests and scenario.seed % 10 not in ROUTER_SEEDS and rng.random() < 0.5
    return rng.choice(list(TierWrite)) if is_drawn else None


def _scenario(seed: int) -> Scenario:
    rng = Random(f"scenario {seed}")
    match seed % 10:
        case 0:
            return _fault_free(rng, seed)
        case 5:
            return _with_faults(rng, _fault_free(rng, seed), _drain, 4)
        case digit if digit in ROUTER_SEEDS:
            base = _router_trouble(rng, seed)
            return _with_faults(rng, replace(base, noise=_noise(rng, base.digests)), _router_fault, 4)
        case _:
            scenario = _fault_free(rng, seed)
            return _with_faults(rng, replace(scenario, noise=_noise(rng, scenario.digests)), _fault, 5)


def _with_faults(rng: Random, scenario: Scenario, draw: Draw, max_faults: int) -> Scenario:
    return replace(scenario, faults=tuple(draw(rng, scenario) for _ in range(rng.randint(1, max_faults))))


def _router_trouble(rng: Random, seed: int) -> Scenario:
    """Two or three routers, and long answers, so many are under way when a router ends."""
    return replace(
        _fault_free(rng, seed, rng.choice([2, 3])), mean_step_s=rng.choice([0.02, 0.05, 0.2]), deadline_s=8.0
    )


def _fault_free(rng: Random, seed: int, num_routers: int | None = None) -> Scenario:
    scenario = Scenario(
        seed=seed,
        num_routers=num_routers or rng.randint(1, 2),
        num_prefills=rng.randint(1, 3),
        num_decodes=rng.randint(1, 3),
        digests=rng.random() < 0.5,
        num_host_pages=rng.choice([0, 8]),
        mean_step_s=rng.choice([0.008, 0.008, 0.03]),
        deadline_s=rng.choice([2.5, 8.0, 8.0, 8.0]),
        noise=Noise(),
        clients=(),
        faults=(),
        growth=GROWTH_MODES[seed // 4 % len(GROWTH_MODES)],
    )
    if seed % 4 == 1:
        scenario = _with_local_prefill(rng, scenario)
    burst = seed % 10 == 7
    num_clients = rng.randint(16, 28) if burst else rng.randint(4, 9)
    return replace(scenario, clients=_clients(rng, num_clients, scenario, burst))


def _with_local_prefill(rng: Random, scenario: Scenario) -> Scenario:
    """Some or all decode workers prefill for themselves, beside prefill workers or without any."""
    num_prefills = rng.choice([0, scenario.num_prefills])
    lowest = 1 if num_prefills else scenario.num_decodes
    return replace(scenario, num_prefills=num_prefills, num_local_prefill=rng.randint(lowest, scenario.num_decodes))


def _clients(rng: Random, num_clients: int, scenario: Scenario, burst: bool) -> tuple[ClientPlan, ...]:
    shared = _tokens(rng, 8)
    last_s = BEGIN_S + 0.2 if burst else rng.choice([BEGIN_S + 0.2, BEGIN_S + 1.0, END_S])
    return tuple(
        ClientPlan(
            name=RequestId(f"r{n}"),
            at_s=rng.uniform(BEGIN_S, last_s),
            prompt=(*shared[: rng.choice([0, 2, 4, 8])], *_tokens(rng, rng.randint(1, 4))),
            max_tokens=rng.choice([1, 2, 4, 8, 12]),
            seed=rng.randrange(4),
            router=rng.choice(scenario.routers),
            num_choices=MAX_CHOICES if rng.random() < 0.1 else 1,
            stop_token=rng.randrange(VOCAB_SIZE) if rng.random() < 0.15 else None,
            patience_s=rng.expovariate(5.0) if rng.random() < 0.25 else None,
            returns=rng.random() < 0.7,
        )
        for n in range(num_clients)
    )


def _with_limits(rng: Random, plan: ClientPlan) -> ClientPlan:
    """Of ten clients, two ask for a regular expression, one for a few tokens only, two for scores of the prompt."""
    kind = rng.random()
    if kind < 0.2:
        plan = replace(plan, regex=rng.choice(REGEXES), stop_token=None)
    elif kind < 0.3:
        plan = replace(plan, allowed=rng.choice([(0, 1), (1, 2), (2,)]))
    return replace(plan, prompt_logprobs=rng.choice([0, 2])) if rng.random() < 0.2 else plan


def _tokens(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def _noise(rng: Random, digests: bool) -> Noise:
    def sometimes(most: float) -> float:
        return rng.choice([0.0, 0.0, rng.uniform(0.0, most)])

    return Noise(
        mean_delay_s=rng.choice([0.0005, 0.003, 0.02]),
        slow=sometimes(0.1),
        loss=sometimes(0.02),
        duplicate=sometimes(0.3),
        read_failure=sometimes(0.1),
        read_corruption=sometimes(0.2) if digests else 0.0,
        read_lateness=sometimes(0.2),
    )


def _drain(rng: Random, scenario: Scenario) -> FaultPlan:
    target = rng.choice([*scenario.prefills, *scenario.decodes, *scenario.routers])
    return FaultPlan(SimFaultKind.DRAIN, rng.uniform(BEGIN_S, END_S), rng.uniform(0.05, MAX_RESTART_S), target)


def _rollout(rng: Random, scenario: Scenario) -> list[FaultPlan]:
    """Upgrades every worker to the next version of the model, one after another or several at a time."""
    return [_plan(rng, SimFaultKind.UPGRADE, worker) for worker in (*scenario.prefills, *scenario.decodes)]


def _rotting(rng: Random, scenario: Scenario) -> list[FaultPlan]:
    """Memory of some workers rots, perhaps of one twice."""
    workers = [*scenario.prefills, *scenario.decodes]
    return [_plan(rng, SimFaultKind.ROT, rng.choice(workers)) for _ in range(rng.randint(1, 4))]


def _budget_changes(rng: Random, scenario: Scenario) -> list[FaultPlan]:
    """Budgets of workers change, in half of the runs that are disturbed."""
    if scenario.seed % 10 == 0 or rng.random() < 0.5:
        return []
    workers = [*scenario.prefills, *scenario.decodes]
    num_changes = rng.randint(1, MAX_BUDGET_CHANGES)
    return [_plan(rng, SimFaultKind.BUDGETS, rng.choice(workers)) for _ in range(num_changes)]


def _losses(rng: Random, scenario: Scenario) -> list[FaultPlan]:
    """The store loses data once or twice, each time near a router's long pause, its end, or a cut from the store."""
    plans = []
    for _ in range(rng.randint(1, 2)):
        away = replace(rng.choice([_long_pause, _killed, _cut_from_store])(rng, scenario), at_s=_early(rng))
        loss = _plan(rng, rng.choice(STORE_LOSSES), STORE)
        plans += [away, replace(loss, at_s=max(BEGIN_S, away.at_s + rng.uniform(-0.5, 2.5)))]
    return plans


def _early(rng: Random) -> float:
    return rng.uniform(BEGIN_S, BEGIN_S + 1.5)


def _long_pause(rng: Random, scenario: Scenario) -> FaultPlan:
    """A freeze of more than two leases."""
    plan = _plan(rng, SimFaultKind.FREEZE, rng.choice(scenario.routers))
    return replace(plan, duration_s=rng.uniform(2 * OWNER_TTL_S, MAX_PARTITION_S))


def _killed(rng: Random, scenario: Scenario) -> FaultPlan:
    return _plan(rng, SimFaultKind.KILL, rng.choice(scenario.routers))


def _router_fault(rng: Random, scenario: Scenario) -> FaultPlan:
    """A fault that makes one router consider another one dead, rightly or not, while clients are served."""
    fault = rng.choices([_to_a_router, _cut_from_store, _fault], [4, 4, 2])[0](rng, scenario)
    return replace(fault, at_s=_early(rng))


def _cut_from_store(rng: Random, scenario: Scenario) -> FaultPlan:
    plan = _plan(rng, rng.choice(LINK_FAULTS), rng.choice(scenario.routers), STORE)
    return replace(plan, duration_s=rng.uniform(1.0, MAX_FAULT_S))


def _fault(rng: Random, scenario: Scenario) -> FaultPlan:
    kinds: list[Draw] = [_to_a_worker, _between_two, _to_a_router, _to_store]
    return rng.choices(kinds, [12, 5, 2, 1])[0](rng, scenario)


def _to_a_worker(rng: Random, scenario: Scenario) -> FaultPlan:
    kind = rng.choices(WORKER_FAULTS, [4, 2, 2, 2])[0]
    return _plan(rng, kind, rng.choice([*scenario.prefills, *scenario.decodes]))


def _to_a_router(rng: Random, scenario: Scenario) -> FaultPlan:
    return _plan(rng, rng.choice(ROUTER_FAULTS), rng.choice(scenario.routers))


def _to_store(rng: Random, scenario: Scenario) -> FaultPlan:
    return _plan(rng, rng.choice(STORE_FAULTS), STORE)


def _between_two(rng: Random, scenario: Scenario) -> FaultPlan:
    workers = [*scenario.prefills, *scenario.decodes]
    pairs = [(prefill, decode) for prefill in scenario.prefills for decode in scenario.decodes]
    pairs += [(router, worker) for router in scenario.routers for worker in workers]
    pairs += [(name, STORE) for name in (*scenario.routers, *workers)]
    ends = list(rng.choice(pairs))
    rng.shuffle(ends)
    return _plan(rng, rng.choice(LINK_FAULTS), ends[0], ends[1])


def _plan(rng: Random, kind: SimFaultKind, target: str, peer: str | None = None) -> FaultPlan:
    longest_s = MAX_DURATION_S.get(kind, MAX_FAULT_S)
    return FaultPlan(kind, rng.uniform(BEGIN_S, END_S), rng.uniform(0.05, longest_s), target, peer)
