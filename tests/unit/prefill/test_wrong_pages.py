"""Wrong pages on the prefill side: kept digests, checked matches, suspects and what ends with a quarantined page."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.domain.errors import ContextOverflow, IntegrityFailure, PageVerdict
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, PageId
from baton.engine.handoff.export_events import Seal
from baton.engine.messages import Fail
from baton.kv.memory import PoolMemory
from baton.services.prefill.policy import PolicySettings
from baton.services.prefill.scheduler import PrefillEffect
from baton.transfer.digest import PoolHasher, page_digest
from tests import tiny_workers
from tests.tiny_workers import (
    NUM_PAGES,
    PAGE_SIZE,
    TinyPrefill,
    assert_idle,
    check_invariants,
    engine_request,
    page_bytes,
    tiny_prefill,
)

LEASE_S = 3.0
PROMPT = [0, 1, 1, 0, 1, 0, 1]  # 3 pages and a partial tail


def run(world: TinyPrefill, max_steps: int = 20) -> list[PrefillEffect]:
    effects: list[PrefillEffect] = []
    for _ in range(max_steps):
        batch = world.scheduler.schedule(0.0)
        effects += world.scheduler.take_pending_effects()
        if batch is None:
            break
        effects += world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    return effects


def seal(world: TinyPrefill, name: str, prompt: list[int] = PROMPT) -> dict[PageId, int]:
    """Computes a prompt; returns the announced digests by page."""
    world.scheduler.add(engine_request(name, prompt), 0, 99.0)
    effects = run(world)
    assert isinstance(effects[-1], Seal)
    return announced(effects)


def announced(effects: list[PrefillEffect]) -> dict[PageId, int]:
    digests: dict[PageId, int] = {}
    for chunk in effects:
        if isinstance(chunk, PublishedChunk):
            assert chunk.digests is not None
            digests |= dict(zip(chunk.pages, chunk.digests, strict=True))
    return digests


def flip(world: TinyPrefill, page: PageId) -> None:
    world.memory.page(page)[0] ^= 0xFF


def suspect(page: PageId, digests: dict[PageId, int]) -> Suspect:
    return Suspect(list(digests).index(page), page, digests[page])


def failures(effects: list[PrefillEffect]) -> list[AttemptId]:
    """Attempts that failed because of a wrong page."""
    errors = [effect for effect in effects if isinstance(effect, Fail)]
    for one in errors:
        assert isinstance(one.error, IntegrityFailure)
        assert one.error.verdict is PageVerdict.SOURCE
    return [one.id for one in errors]


def test_the_announced_digest_is_that_of_the_settled_bytes():
    """Damage between settling and publishing must not be signed: a flipped page is announced with its old digest."""
    world = tiny_prefill(LEASE_S)
    first = seal(world, "a", PROMPT[:-1])
    world.exports.commit(engine_request("a", PROMPT).id)
    world.scheduler.add(engine_request("b", [*PROMPT, 1, 1]), 0, 99.0)
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    output = world.runner.run(batch)
    page = next(iter(first))
    flip(world, page)
    digests = announced(world.scheduler.commit(batch, output, 0.0))
    assert digests[page] == first[page] != page_digest(world.memory.page(page))


def test_only_the_partial_tail_is_hashed_at_the_seal():
    world = tiny_prefill(LEASE_S)
    digests = seal(world, "a")
    tail = list(digests)[-1]
    assert digests[tail] == page_digest(world.memory.page(tail))
    assert not world.cache.pool.digests.is_settled(tail)
    assert world.exports.announced(engine_request("a", PROMPT).id) == digests


def test_a_prompt_that_matches_a_wrong_page_computes_it_anew():
    world = tiny_prefill(LEASE_S)
    page = list(seal(world, "a", PROMPT[:-1]))[1]
    world.exports.commit(engine_request("a", PROMPT).id)
    flip(world, page)
    digests = seal(world, "b")
    assert world.scheduler.quarantine.num_pages == 2, "the third page was computed from the second"
    for index, new in enumerate(digests):
        expected = page_bytes(tuple(PROMPT), index)
        assert bytes(world.memory.page(new)[: len(expected)]) == expected
    (key,), number = world.scheduler.quarantine.since(0)
    assert number == 1
    assert world.cache.page_of(key) == list(digests)[1]


def test_an_open_export_fails_with_its_page():
    world = tiny_prefill(LEASE_S, max_pinned_pages=NUM_PAGES)
    page = next(iter(seal(world, "a", PROMPT[:-1])))
    seal(world, "c", [1, 1, 1])
    flip(world, page)
    world.scheduler.add(engine_request("b", PROMPT), 0, 99.0)
    effects = run(world)
    assert failures(effects[:1]) == [engine_request("a", PROMPT).id]
    assert isinstance(effects[-1], Seal)
    assert world.exports.condemned() == []
    assert world.exports.announced(engine_request("c", [1]).id), "its pages are not affected"


def test_a_prompt_in_progress_over_a_wrong_page_starts_again():
    world = tiny_prefill(LEASE_S, token_budget=2, max_pinned_pages=NUM_PAGES)
    page = next(iter(seal(world, "a", PROMPT[:-1])))
    world.exports.commit(engine_request("a", PROMPT).id)
    decode_has_all = len(PROMPT)
    world.scheduler.add(engine_request("b", [*PROMPT, 1, 0, 1]), decode_has_all, 99.0)
    world.scheduler.add(engine_request("c", [1, 1]), 0, 99.0)
    assert world.scheduler.schedule(0.0) is not None
    flip(world, page)
    assert failures(world.scheduler.on_wrong_pages([page], 0.0)) == []
    assert (world.scheduler.num_chunking, world.scheduler.num_waiting) == (0, 2)
    sealed = [effect.id.request_id for effect in run(world) if isinstance(effect, Seal)]
    assert sealed == ["b", "c"], "it returned to the head of the queue"


def test_a_prompt_that_has_published_a_wrong_page_fails():
    world = tiny_prefill(LEASE_S, token_budget=2)
    request = engine_request("a", PROMPT)
    world.scheduler.add(request, 0, 99.0)
    page = next(iter(announced(run(world, max_steps=1))))
    flip(world, page)
    assert failures(world.scheduler.on_wrong_pages([page], 0.0)) == [request.id]
    assert run(world) == []
    assert_idle(world.cache)


def test_the_rows_of_a_prompt_that_fails_in_a_schedule_are_dropped():
    """Its pages are free, and the prompt admitted in the same step may get them."""
    world = tiny_prefill(LEASE_S, token_budget=8, max_pinned_pages=NUM_PAGES)
    older, newer = engine_request("a", [0] * 13), engine_request("b", [0, 0, 0, 0, 1])
    world.scheduler.add(older, 0, 99.0)
    run(world, max_steps=1)
    flip(world, PageId(0))
    world.scheduler.add(newer, 0, 99.0)
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    assert failures(world.scheduler.take_pending_effects()) == [older.id]
    assert [row.id for row in batch.rows] == [newer.id]
    world.scheduler.commit(batch, world.runner.run(batch), 0.0)


class TestSuspects:
    def test_a_page_that_differs_at_the_source(self):
        world = tiny_prefill(LEASE_S)
        digests = seal(world, "a")
        id, page = engine_request("a", PROMPT).id, list(digests)[1]
        flip(world, page)
        verdict, effects = world.scheduler.examine(id, [suspect(page, digests)], 0.0)
        assert verdict is PageVerdict.SOURCE
        assert failures(effects) == [id]
        assert len(world.cache) == 1, "the page before it is good"
        assert_idle(world.cache)

    def test_pages_that_are_intact_at_the_source(self):
        world = tiny_prefill(LEASE_S)
        digests = seal(world, "a")
        id = engine_request("a", PROMPT).id
        suspects = [suspect(page, digests) for page in digests]
        assert world.scheduler.examine(id, suspects, 0.0) == (PageVerdict.LINK, [])
        assert len(world.cache) == 3

    def test_a_digest_that_changed_on_its_way(self):
        world = tiny_prefill(LEASE_S)
        digests = seal(world, "a")
        page = next(iter(digests))
        verdict, _ = world.scheduler.examine(engine_request("a", PROMPT).id, [Suspect(0, page, 123)], 0.0)
        assert verdict is PageVerdict.LINK

    def test_a_partial_tail_that_differs(self):
        world = tiny_prefill(LEASE_S)
        digests = seal(world, "a")
        id, tail = engine_request("a", PROMPT).id, list(digests)[-1]
        flip(world, tail)
        verdict, effects = world.scheduler.examine(id, [suspect(tail, digests)], 0.0)
        assert verdict is PageVerdict.SOURCE
        assert failures(effects) == [id]
        assert len(world.cache) == 3
        assert world.scheduler.quarantine.since(0) == ((), 0), "a tail is in no cache"
        assert_idle(world.cache)

    def test_an_export_that_has_ended_gets_no_verdict(self):
        world = tiny_prefill(LEASE_S)
        digests = seal(world, "a")
        id = engine_request("a", PROMPT).id
        page = next(iter(digests))
        world.exports.commit(id)
        flip(world, page)
        assert world.scheduler.examine(id, [suspect(page, digests)], 0.0) == (None, [])

    def test_pages_of_other_exports_are_not_examined(self):
        world = tiny_prefill(LEASE_S, max_pinned_pages=NUM_PAGES)
        digests = seal(world, "a")
        seal(world, "b", [1, 1, 1])
        page = next(iter(digests))
        flip(world, page)
        foreign = [Suspect(0, page, 1), Suspect(9, PageId(10**6), 1)]
        assert world.scheduler.examine(engine_request("b", [1]).id, foreign, 0.0) == (None, [])


def test_a_retired_page_shrinks_what_fits():
    world = tiny_prefill(LEASE_S)
    for now in (0.0, 1.0):
        digests = seal(world, f"r{now}", [1, 0])
        (page,) = digests
        world.scheduler.on_wrong_pages([page], now)
    assert world.cache.pool.num_usable == NUM_PAGES - 1
    (failure,) = world.scheduler.add(engine_request("b", [0] * (NUM_PAGES * PAGE_SIZE)), 0, 99.0)
    assert isinstance(failure, Fail)
    assert isinstance(failure.error, ContextOverflow)


class CountingHasher(PoolHasher):
    """Remembers how many pages each call hashed."""

    def __init__(self, memory: PoolMemory, hashed: list[int]) -> None:
        super().__init__(memory)
        self._hashed = hashed

    def digests(self, pages: Sequence[PageId]) -> tuple[int, ...]:
        self._hashed.append(len(pages))
        return super().digests(pages)


def test_a_page_is_hashed_when_it_settles_and_when_it_is_matched(monkeypatch: pytest.MonkeyPatch):
    """As often as each publish hashed it, and once for pages that decode has, which no publish hashed."""
    hashed: list[int] = []
    monkeypatch.setattr(tiny_workers, "PoolHasher", lambda memory: CountingHasher(memory, hashed))
    world = tiny_prefill(LEASE_S)
    seal(world, "a")
    assert hashed == [2, 1, 1], "the chunks' full pages, then the tail"
    world.exports.commit(engine_request("a", PROMPT).id)
    hashed.clear()
    world.scheduler.add(engine_request("b", PROMPT), 2 * PAGE_SIZE, 99.0)
    assert isinstance(run(world)[-1], Seal)
    assert hashed == [3, 1], "three matched pages, of which decode has two, and the tail"


def test_a_prompt_keeps_its_own_page_when_the_cached_duplicate_is_wrong():
    """b computes what a has cached meanwhile, and a's page rots in between: b announces and caches its own."""
    order = PolicySettings(prefix_sharing=False)
    world = tiny_prefill(LEASE_S, token_budget=8, max_pinned_pages=NUM_PAGES, order=order)
    b = engine_request("b", [*PROMPT, 1, 1])
    world.scheduler.add(engine_request("a", PROMPT[:-1]), 0, 99.0)
    world.scheduler.add(b, 0, 99.0)
    first = announced(run(world, max_steps=1))
    rotten = list(first)[1]
    assert sorted(world.exports.announced(b.id)) == [next(iter(first))], "b is one page into the prompt"
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    output = world.runner.run(batch)
    flip(world, rotten)
    digests = announced(world.scheduler.commit(batch, output, 0.0))
    assert rotten not in digests
    for page, digest in digests.items():
        assert digest == page_digest(world.memory.page(page))
    wrong = world.cache.take_wrong()
    assert wrong == [rotten]
    assert failures(world.scheduler.on_wrong_pages(wrong, 0.0)) == [engine_request("a", PROMPT).id]
    assert list(world.exports.announced(b.id)) == [next(iter(first)), *digests]
    check_invariants(world.cache)
