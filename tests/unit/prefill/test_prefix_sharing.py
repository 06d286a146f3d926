"""Prompts that share new pages: they are computed once, and nobody waits for an owner that has ended."""

from __future__ import annotations

import pytest

from baton.engine.handoff.export_events import Seal
from baton.kv.keys import page_keys
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.prefill.policy import PolicySettings, PrefillLimits, PrefillPolicy
from baton.services.prefill.prompt import Prompt
from baton.services.prefill.queue import PromptQueue
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, TinyPrefill, assert_idle, engine_request, tiny_prefill

SHARED = [0, 1, 1, 0, 1, 0]  # 3 pages


def world_of() -> TinyPrefill:
    """Two pages a step."""
    return tiny_prefill(9.0, 2 * PAGE_SIZE, NUM_PAGES, 4)


def add(world: TinyPrefill, name: str, prompt: list[int], salt: str = "") -> None:
    world.scheduler.add(engine_request(name, prompt, salt=salt), 0, 99.0)


def step(world: TinyPrefill) -> dict[str, int]:
    """Runs a step; returns the tokens of each prompt. Sealed exports are committed."""
    batch = world.scheduler.schedule(0.0)
    if batch is None:
        return {}
    for effect in world.scheduler.commit(batch, world.runner.run(batch), 0.0):
        if isinstance(effect, Seal):
            assert world.exports.commit(effect.id)
    return {row.id.request_id: len(row.tokens) for row in batch.rows}


def test_the_second_prompt_waits_for_the_pages_of_the_first():
    world = world_of()
    add(world, "owner", [*SHARED, 1])
    add(world, "held", [*SHARED, 0])
    assert [step(world), step(world), step(world)] == [{"owner": 4}, {"owner": 3}, {"held": 1}]
    assert_idle(world.cache)


@pytest.mark.parametrize(("prefix_sharing", "num_tokens"), [(True, 9), (False, 15)])
def test_sharing_can_be_turned_off(prefix_sharing: bool, num_tokens: int):
    """Both begin in the first step, of four pages, without sharing."""
    order = PolicySettings(prefix_sharing=prefix_sharing)
    world = tiny_prefill(9.0, 4 * PAGE_SIZE, NUM_PAGES, 4, long_prompt_tokens=2 * PAGE_SIZE, order=order)
    add(world, "first", [*SHARED, 1, 1])
    add(world, "second", [*SHARED, 0])
    assert sum(sum(step(world).values()) for _ in range(4)) == num_tokens


def test_younger_prompts_pass_a_held_one():
    world = world_of()
    add(world, "owner", SHARED)
    add(world, "held", [*SHARED, 0])
    assert step(world) == {"owner": 4}
    add(world, "other", [1])
    assert step(world) == {"owner": 2, "other": 1}
    assert step(world) == {"held": 1}


@pytest.mark.parametrize("how", ["abort", "deadline", "newer attempt"])
def test_an_owner_that_ends_releases_those_it_holds_up(how: str):
    world = world_of()
    world.scheduler.add(engine_request("owner", [*SHARED, 1]), 0, 5.0)
    add(world, "held", [*SHARED, 0])
    assert step(world) == {"owner": 4}
    match how:
        case "abort":
            assert world.scheduler.abort(engine_request("owner", []).id)
        case "deadline":
            world.scheduler.expire(5.0)
        case _:
            world.scheduler.add(engine_request("owner", [1], attempt=2), 0, 99.0)
    assert step(world)["held"] == 3, "what the owner computed is not lost"
    step(world)
    assert_idle(world.cache)


def queue_of(begun: str, **prompts: list[int]) -> PromptQueue:
    """Prompts in the order of their arrival under srpt, of which one has begun."""
    cache = PrefixCache(PagePool(64))
    queue = PromptQueue(cache, PrefillLimits(PAGE_SIZE, 4, 4, 64, order=PolicySettings(PrefillPolicy.SRPT)))
    for name, tokens in prompts.items():
        request = engine_request(name, tokens)
        prompt = Prompt(request, PageTable(cache, PAGE_SIZE, "", Hold.LIVE), 99.0, 0.0)
        prompt.keys, prompt.num_matchable = page_keys(tokens, PAGE_SIZE, ""), (len(tokens) - 1) // PAGE_SIZE
        queue.add(prompt)
        if name == begun:
            queue.admit(prompt)
    return queue


def test_an_owner_has_the_rank_of_the_prompt_that_it_holds_up():
    queue = queue_of("owner", owner=[*SHARED, *[1] * 20], medium=[1] * 12)
    assert [prompt.request.id.request_id for prompt in queue.in_order(lambda _: False)] == ["medium", "owner"]
    queue = queue_of("owner", owner=[*SHARED, *[1] * 20], medium=[1] * 12, held=[*SHARED, 0])
    assert [prompt.request.id.request_id for prompt in queue.in_order(lambda _: False)] == ["owner", "medium"]


def test_an_owner_has_the_age_of_the_prompt_that_it_holds_up():
    queue = queue_of("owner", held=[*SHARED, 0], medium=[1] * 12, owner=[*SHARED, *[1] * 20])
    queue.in_order(lambda _: False)
    assert queue.oldest is not None
    assert queue.oldest.request.id.request_id == "owner"


def test_an_owner_whose_chunk_ended_inside_a_page_is_waited_for():
    """As behind an image that no step cuts: the page is not there yet, and the next step fills it."""
    queue = queue_of("owner", owner=[*SHARED, *[1] * 20], medium=[1] * 12, held=[*SHARED, 0])
    (owner,) = queue.chunking
    owner.num_filled = PAGE_SIZE - 1
    assert [prompt.request.id.request_id for prompt in queue.in_order(lambda _: False)] == ["owner", "medium"]


def test_one_shared_page_is_not_waited_for():
    world = world_of()
    add(world, "first", [0, 1, 1])
    add(world, "second", [0, 1, 0])
    assert step(world) == {"first": 3}
    world = tiny_prefill(9.0, 4 * PAGE_SIZE, NUM_PAGES, 4)
    add(world, "first", [0, 1, 1])
    add(world, "second", [0, 1, 0])
    assert step(world) == {"first": 3, "second": 3}


def test_prompts_under_different_salts_do_not_wait():
    world = tiny_prefill(9.0, 8 * PAGE_SIZE, NUM_PAGES, 4)
    add(world, "first", [*SHARED, 1], salt="a")
    add(world, "second", [*SHARED, 0], salt="b")
    assert step(world) == {"first": 7, "second": 7}
