"""The order of prompts: cached prefixes, deadlines, missing pages, and what is left to compute."""

from __future__ import annotations

from baton.engine.handoff.export_events import Seal
from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, TinyPrefill, engine_request, tiny_prefill

PROMPT = [0, 1, 1, 0, 1, 0]  # 3 pages
OTHER = [1, 0, 0, 1, 0, 0]


def world_of(
    policy: PrefillPolicy, max_overtakes: int = 64, max_partial_prompts: int = 4, budget_pages: int = 4
) -> TinyPrefill:
    """The oldest prompt is guaranteed one page a step."""
    order = PolicySettings(policy, oldest_prompt_share=0.0, max_overtakes=max_overtakes)
    return tiny_prefill(9.0, budget_pages * PAGE_SIZE, NUM_PAGES, max_partial_prompts, order=order)


def step(world: TinyPrefill, *, commit: bool = True) -> list[str]:
    """Runs a step; returns its prompts in order. Sealed exports are committed."""
    batch = world.scheduler.schedule(0.0)
    if batch is None:
        return []
    for effect in world.scheduler.commit(batch, world.runner.run(batch), 0.0):
        if isinstance(effect, Seal) and commit:
            assert world.exports.commit(effect.id)
    return [row.id.request_id for row in batch.rows]


def add(world: TinyPrefill, name: str, prompt: list[int], deadline: float = 99.0) -> None:
    world.scheduler.add(engine_request(name, prompt), 0, deadline)


def cached_and_new(policy: PrefillPolicy) -> list[str]:
    """Order of prompts after the oldest, of which the later one is cached for the most part."""
    world = world_of(policy)
    add(world, "first", PROMPT)
    step(world)
    add(world, "oldest", [1, 1])
    add(world, "new", OTHER)
    add(world, "cached", [*PROMPT, 1])
    return step(world)


def test_the_longest_cached_prefix_goes_first():
    assert cached_and_new(PrefillPolicy.LPM) == ["cached", "oldest", "new"]
    assert cached_and_new(PrefillPolicy.FCFS) == ["oldest", "new"], "and what fills the step to a page edge"


def test_the_earliest_deadline_goes_first():
    world = world_of(PrefillPolicy.EDF)
    add(world, "a", [0] * 6)
    add(world, "late", OTHER)
    add(world, "soon", PROMPT, deadline=0.5)
    assert step(world) == ["soon", "a"]


def test_cached_tokens_are_not_left_to_compute():
    """A prompt that its cached pages let end in this step needs no slot among half-done ones."""
    world = world_of(PrefillPolicy.SRPT, max_partial_prompts=1, budget_pages=2)
    add(world, "first", PROMPT[:4])
    step(world)
    add(world, "long", [1] * 10)
    add(world, "cached", [*PROMPT[:4], 0])
    assert step(world) == ["cached", "long"]


def test_admission_waits_for_a_prompt_that_was_overtaken():
    world = world_of(PrefillPolicy.SRPT, max_overtakes=2)
    add(world, "pinned", [0] * 6)
    step(world, commit=False)
    add(world, "large", [1] * 12)
    passed = []
    for number in range(5):
        add(world, f"small{number}", [number % 2])
        passed += step(world)
    assert passed == ["small0", "small1"], "5 pages are free for 6"
    assert world.exports.commit(engine_request("pinned", []).id)
    assert "large" in step(world)


def by_priority(policy: PrefillPolicy, *, heeds: bool) -> list[str]:
    """Order of a long prompt of high priority, which came last, among others; the oldest has its share."""
    order = PolicySettings(policy, oldest_prompt_share=0.0, by_priority=heeds)
    world = tiny_prefill(9.0, 4 * PAGE_SIZE, NUM_PAGES, 4, order=order)
    for name, prompt, priority in (("oldest", [1, 1], 0), ("low", [0, 1], -1), ("high", PROMPT, 2)):
        world.scheduler.add(engine_request(name, prompt, priority=priority), 0, 99.0)
    return step(world)


def test_a_higher_priority_goes_first_where_workers_heed_it():
    for policy in PrefillPolicy:
        assert by_priority(policy, heeds=True)[0] == "high"
    assert by_priority(PrefillPolicy.SRPT, heeds=False)[0] != "high"


def test_the_policy_orders_prompts_of_one_priority():
    world = tiny_prefill(
        9.0, 4 * PAGE_SIZE, NUM_PAGES, 4, order=PolicySettings(PrefillPolicy.SRPT, 0.0, by_priority=True)
    )
    for name, prompt in (("oldest", [0] * 8), ("long", OTHER), ("short", [1, 1])):
        world.scheduler.add(engine_request(name, prompt, priority=1), 0, 99.0)
    assert step(world)[0] == "short"
