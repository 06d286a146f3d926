"""Prefill over a pool whose window parts have few slots: what is announced, judged and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import ContextOverflow, PageVerdict
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import PageId
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest, StopParams
from baton.engine.messages import Fail
from baton.kv.windows.slots import NO_SLOT
from tests.tiny_workers import NUM_PAGES, WINDOW, TinyPrefill, engine_request, tiny_prefill

LONG = [0, 1, 1, 0, 1, 1, 0, 0]


def world_of(num_slots: int, token_budget: int = 4) -> TinyPrefill:
    return tiny_prefill(100.0, token_budget=token_budget, max_pinned_pages=NUM_PAGES, num_window_slots=num_slots)


def compute(world: TinyPrefill, name: str, tokens: list[int]) -> tuple[EngineRequest, list[PublishedChunk]]:
    """Runs one prompt to its seal."""
    request, published = engine_request(name, tokens, stop=StopParams(3)), list[PublishedChunk]()
    effects = world.scheduler.add(request, 0, 50.0, 0.0)
    assert not effects
    while (batch := world.scheduler.schedule(0.0)) is not None:
        effects = world.scheduler.commit(batch, world.runner.run(batch), 0.0)
        published += [one for one in effects if isinstance(one, PublishedChunk)]
    return request, published


def test_a_page_that_got_its_window_part_back_is_not_judged_damaged():
    world = world_of(7)
    windows = world.cache.pool.windows
    assert windows is not None
    first, _ = compute(world, "a", [*LONG, 1])
    world.scheduler.abort(first.id)
    while windows.num_unheld > 1:
        windows._evict()
    request, published = compute(world, "b", [*LONG, 0])
    page = published[0].pages[0]
    assert windows.slot_of[page] == NO_SLOT, "announced without its window part"
    compute(world, "c", [*LONG[:2], 0, 0, 0])
    assert windows.slot_of[page] != NO_SLOT, "a duplicate has given it its own"
    assert world.scheduler.examine(request.id, [Suspect(0, page, 0)], 9.0) == (PageVerdict.LINK, [])
    world.memory.page(page)[0] ^= 1
    assert world.scheduler.examine(request.id, [Suspect(0, page, 0)], 9.0)[0] is PageVerdict.SOURCE


def test_only_slots_that_are_kept_for_decode_are_announced():
    world = world_of(8, token_budget=16)
    request, published = compute(world, "a", [*LONG, 1])
    slots = {page: slot for one in published for page, slot in zip(one.pages, one.window_slots, strict=True)}
    edge = WINDOW.first_page(len(request.tokens))
    pages = [PageId(page) for one in published for page in one.pages]
    assert [slots[page] != NO_SLOT for page in pages] == [number >= edge for number in range(len(pages))]
    assert edge > 0


@pytest.mark.parametrize(("num_rows", "fits"), [(4, True), (12, False)])
def test_an_image_that_no_step_can_hold_is_refused(num_rows: int, fits: bool):
    """It must not be cut, so a step needs the slots of all its tokens and of the window before it."""
    world = world_of(6, token_budget=14)
    world.scheduler.limits = replace(world.scheduler.limits, whole_images=True)
    tokens = [0] * (num_rows + 2)
    request = replace(engine_request("a", tokens), media=(MediaSpan(1, num_rows, bytes(16)),))
    effects = world.scheduler.add(request, 0, 50.0, 0.0)
    if fits:
        assert not effects
        return
    (fail,) = effects
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, ContextOverflow)
    assert "window slots, this worker has 6" in str(fail.error)
    assert world.scheduler.schedule(0.0) is None


def test_short_prompts_share_the_slots_that_a_long_one_needs():
    """Each needs as many as it has pages, whatever a step may take."""
    world = world_of(4, token_budget=8)
    for name in ("a", "b"):
        assert not world.scheduler.add(engine_request(name, [0, 1, 1, int(name == "a")]), 0, 50.0, 0.0)
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    assert [len(row.tokens) for row in batch.rows] == [4, 4]


def test_a_short_prompt_is_not_refused_for_the_slots_of_a_long_one():
    world = world_of(2, token_budget=8)
    _, published = compute(world, "a", [0, 1, 1])
    assert published
