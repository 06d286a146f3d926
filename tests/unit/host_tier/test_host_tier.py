"""Copies of cached pages in host memory: what each way to write keeps, hits by tier, and copies that were damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import PageKey
from baton.domain.worker import WorkerRole
from baton.engine.tiers import controller
from baton.kv.events.event import CacheEvent, StoredEvent
from baton.kv.events.source import EventSource
from baton.kv.keys import page_keys
from baton.kv.pages import Hold
from baton.kv.tiers.lower_tier import TierUse
from baton.settings.tiers import TierWrite
from baton.telemetry import metrics
from tests.tiny_workers import NUM_PAGES, PAGE_BYTES, PAGE_SIZE, REPEATABLE_SETTINGS
from tests.unit.host_tier.host_world import HostWorld

FIRST = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]
SECOND = [1, *FIRST[1:], 0, 1]
NUM_FULL = len(FIRST) // PAGE_SIZE
KEYS = page_keys(tuple(FIRST), PAGE_SIZE, "")


def corrupt() -> float:
    return metrics.TIER_CORRUPT_TOTAL.labels("host")._value.get()


@pytest.mark.parametrize(
    ("write", "num_asked", "num_copies"),
    [
        (TierWrite.NONE, 2, 0),
        (TierWrite.THROUGH, 1, NUM_FULL),
        (TierWrite.SELECTIVE, 1, 0),
        (TierWrite.SELECTIVE, 2, NUM_FULL),
        (TierWrite.BACK, 2, 0),
    ],
)
def test_each_way_to_write_copies_what_it_says(write: TierWrite, num_asked: int, num_copies: int):
    world = HostWorld([write])
    for _ in range(num_asked):
        world.ask(FIRST)
    world.scheduler.schedule(0.0)  # the turn that takes what has ended
    assert len(world.tiers[0]) == num_copies
    world.cache.clear()
    assert len(world.tiers[0]) == (NUM_FULL if write is TierWrite.BACK else num_copies)


def test_a_turn_copies_a_bounded_number_of_evicted_pages(monkeypatch: pytest.MonkeyPatch):
    """What is evicted beyond the bound is a miss; the next turn copies again."""
    monkeypatch.setattr(controller, "WRITE_BACK_BYTES", 2 * PAGE_BYTES)
    world = HostWorld()
    world.ask(FIRST)
    world.scheduler.schedule(0.0)
    world.cache.clear()
    assert len(world.tiers[0]) == 2 < NUM_FULL
    assert [key in world.tiers[0] for key in KEYS[:3]] == [True, True, False], "copies are closed to the root"
    world.ask(FIRST)
    world.scheduler.schedule(0.0)
    world.cache.clear()
    assert len(world.tiers[0]) == min(4, NUM_FULL)


def test_evicted_pages_come_back_in_the_turn_that_needs_them():
    world = HostWorld()
    world.ask(FIRST)
    world.ask(SECOND)
    assert KEYS[-1] in world.tiers[0]
    assert world.cache.num_matching(KEYS) < NUM_FULL, "the second prompt took pages"
    num_here = world.cache.num_matching(KEYS)
    events: list[CacheEvent] = []
    world.cache.events = EventSource(events.extend, with_content=True)
    seal = world.ask(FIRST)
    assert seal.times.cached_tokens == NUM_FULL * PAGE_SIZE
    assert seal.num_from_tiers == {"host": (NUM_FULL - num_here) * PAGE_SIZE}
    assert world.num_turns == 1
    world.cache.events.flush()
    entered = [event.content.tokens for event in events if isinstance(event, StoredEvent)]
    pages = [tuple(FIRST[start : start + PAGE_SIZE]) for start in range(0, NUM_FULL * PAGE_SIZE, PAGE_SIZE)]
    assert entered == pages[num_here:], "readers of events need them"


def test_write_back_copies_a_chain_whose_last_page_is_evicted_first():
    """Leaves are evicted first, and a copy needs that of the page before it."""
    world = HostWorld()
    world.ask(FIRST)
    assert world.cache.num_matching(KEYS) == NUM_FULL
    world.cache.allocate(NUM_PAGES - NUM_FULL + 1, Hold.LIVE)
    assert world.cache.num_matching(KEYS) == NUM_FULL - 1
    assert [key in world.tiers[0] for key in KEYS[:NUM_FULL]] == [True] * NUM_FULL


def test_a_tier_without_room_keeps_what_fits():
    world = HostWorld(num_slots=2)
    world.ask(FIRST)
    world.cache.clear()
    assert world.ask(FIRST).num_from_tiers == {"host": 2 * PAGE_SIZE}


def test_a_turn_reads_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch):
    """And the loop is woken for the rest, though nothing is in flight."""
    monkeypatch.setattr(controller, "READ_BYTES", 2 * PAGE_BYTES)
    world = HostWorld()
    world.ask(FIRST)
    world.cache.clear()
    assert world.ask(FIRST).num_from_tiers == {"host": NUM_FULL * PAGE_SIZE}
    assert world.num_turns == -(-NUM_FULL // 2)


@pytest.mark.parametrize("page", range(NUM_FULL))
def test_a_damaged_copy_costs_a_miss(page: int):
    """And goes with all that was computed from it."""
    world = HostWorld()
    world.ask(FIRST)
    world.cache.clear()
    world.flip(KEYS[page])
    before = corrupt()
    seal = world.ask(FIRST)
    assert (seal.times.cached_tokens, corrupt() - before) == (page * PAGE_SIZE, 1)
    assert [key in world.tiers[0] for key in KEYS[:NUM_FULL]] == [number < page for number in range(NUM_FULL)]


@pytest.mark.parametrize("of_a_peer", [True, False])
def test_quarantine_reaches_all_tiers(of_a_peer: bool):
    world = HostWorld([TierWrite.THROUGH, TierWrite.THROUGH])
    world.ask(FIRST)
    world.scheduler.schedule(0.0)
    assert [len(tier) for tier in world.tiers] == [NUM_FULL, NUM_FULL]
    if of_a_peer:
        world.scheduler.on_keys_quarantined([KEYS[1]])
    else:
        page = world.cache.page_of(KEYS[1])
        world.leading.page(page)[0] ^= 1
        world.scheduler.on_wrong_pages([page], 0.0)
    world.scheduler.schedule(0.0)
    assert [len(tier) for tier in world.tiers] == [1, 1]


def test_a_lower_tier_reads_on_where_the_upper_one_ends():
    world = HostWorld([TierWrite.THROUGH, TierWrite.THROUGH])
    world.ask(FIRST)
    world.scheduler.schedule(0.0)
    world.cache.clear()
    world.flip(KEYS[2])
    seal = world.ask(FIRST)
    rest = (NUM_FULL - 2) * PAGE_SIZE
    assert seal.num_from_tiers == {"host": 2 * PAGE_SIZE, "other": rest}
    assert seal.times.computed_tokens == len(FIRST) - NUM_FULL * PAGE_SIZE


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 5), st.integers(1, 2 * NUM_PAGES - 2)),
        st.tuples(st.just("flip"), st.integers(0, 31), st.integers(0, 1)),
        st.tuples(st.just("quarantine"), st.integers(0, NUM_PAGES), st.integers(0, 1)),
    ),
    max_size=25,
)


@given(steps=STEPS, writes=st.lists(st.sampled_from(TierWrite), min_size=1, max_size=2), num_slots=st.integers(1, 20))
@REPEATABLE_SETTINGS
def test_whatever_happens_to_copies_tokens_are_the_models(
    steps: list[tuple[str, int, int]], writes: list[TierWrite], num_slots: int
):
    """`ask` compares them, and checks the slots of all tiers, the cache and the pool in every turn."""
    world = HostWorld(writes, num_slots)
    prompts = [[number >> bit & 1 for bit in range(3)] + FIRST + SECOND for number in range(6)]
    for what, number, other in steps:
        if what == "ask":
            world.ask(prompts[number][:other])
        elif what == "flip" and number < num_slots and other < len(writes):
            world.copies[other].page(number)[0] ^= 1
        elif what == "quarantine":
            keys = page_keys(tuple(prompts[0]), PAGE_SIZE, "")
            world.scheduler.on_keys_quarantined([keys[number % len(keys)] if other else PageKey(b"of no page")])
    world.check()


def test_a_page_that_two_tiers_read_in_turn_is_counted_once():
    """Read ahead for a prompt that goes away, evicted unused, and read again from the copy of its eviction."""
    world = HostWorld([TierWrite.BACK, TierWrite.THROUGH])
    world.ask(FIRST)
    for _ in range(2):  # writes begin, and are seen to have ended
        world.scheduler.schedule(0.0)
    world.cache.clear()  # as after a restart: only the lower tier has them
    world.tiers[0].drop(KEYS[0])
    world.stack.prefetch([TierUse(KEYS[:NUM_FULL])], 0.0)
    assert world.cache.num_matching(KEYS) == NUM_FULL
    world.cache.clear()
    assert KEYS[NUM_FULL - 1] in world.tiers[0]
    assert world.ask(FIRST).num_from_tiers == {"host": NUM_FULL * PAGE_SIZE}


def test_an_imported_page_that_a_tier_reads_again_is_the_tiers():
    world = HostWorld()
    world.ask(FIRST)
    world.scheduler.imports._fresh = dict.fromkeys(KEYS, WorkerRole.DECODE)
    world.cache.clear()
    seal = world.ask(FIRST)
    assert seal.num_from_tiers == {"host": NUM_FULL * PAGE_SIZE}
    assert not seal.num_imported
