"""Pages that are wrong in decode's own memory: nothing starts over them, and nothing that used them goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.domain.errors import Broken, IntegrityFailure, PageVerdict, SentBack
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, PageId, WorkerId
from baton.domain.request import EngineRequest, SampledToken, StopParams
from baton.engine.handoff.import_effects import AskVerdict, ConfirmCommit
from baton.engine.messages import Fail
from baton.kv.keys import page_keys
from baton.kv.pages import Hold
from baton.kv.swap_space import SwapSpace
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.kv_import import Reserved, SealInfo
from baton.services.decode.rows.send_back import SendBackReason
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.digest import PoolHasher
from tests.tiny_workers import (
    PAGE_SIZE,
    TinyDecode,
    assert_idle,
    engine_request,
    expected_output,
    next_token,
    num_pages,
    page_bytes,
    tiny_decode,
    true_digests,
)

SOURCE = WorkerId("prefill-0")
PROMPT = [0, 1, 1, 0, 1]
STOP = StopParams(max_tokens=4)


def keys_of(request: EngineRequest) -> list:
    return page_keys(request.tokens, PAGE_SIZE, request.salt)


def reserve(world: TinyDecode, request: EngineRequest) -> Reserved:
    answer, _ = world.import_policy.reserve(request.id, len(request.tokens), keys_of(request), 0.0, 5.0)
    assert isinstance(answer, Reserved)
    return answer


def start(world: TinyDecode, request: EngineRequest) -> list[DecodeEffect]:
    """Reserves, publishes and seals; returns the reads."""
    answer = reserve(world, request)
    world.import_policy.claim(answer.id, request, SOURCE, 9.0)
    first, end = answer.prefix_len // PAGE_SIZE, num_pages(len(request.tokens))
    pages = tuple(PageId(i) for i in range(first, end))
    digests = true_digests(request.tokens, first, end)
    effects = world.import_policy.on_chunk(PublishedChunk(request.id, first, pages, digests), 0.0)
    token, _ = next_token(request, list(request.tokens))
    return effects + world.import_policy.on_seal(request.id, SealInfo(SampledToken(token), None, end), 0.0)


def read_all(world: TinyDecode, request: EngineRequest, effects: list[DecodeEffect]) -> list[DecodeEffect]:
    others: list[DecodeEffect] = []
    while effects:
        effect = effects.pop(0)
        if not isinstance(effect, Pull):
            others.append(effect)
            continue
        for index, page in zip(effect.remote_pages, effect.local_pages, strict=True):
            data = page_bytes(request.tokens, index)
            world.memory.page(page)[: len(data)] = data
        effects += world.import_policy.on_pull_event(PullEvent(effect, PullOutcome.DONE, 64, 0.1), 0.0)
    return others


def board(world: TinyDecode, request: EngineRequest) -> None:
    read_all(world, request, start(world, request))
    world.import_policy.check_pages(0.0)
    assert world.scheduler.num_rows


def run_to_the_end(world: TinyDecode) -> list[DecodeEffect]:
    effects: list[DecodeEffect] = []
    while (batch := world.scheduler.schedule(0.0)) is not None:
        effects += world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    return effects + world.scheduler.take_pending_effects()


def failures(effects: list[DecodeEffect]) -> dict[AttemptId, Exception]:
    return {effect.id: effect.error for effect in effects if isinstance(effect, Fail)}


def served(name: str = "first") -> tuple[TinyDecode, EngineRequest]:
    """A world whose prefix cache holds a prompt's two full pages."""
    world = tiny_decode(digests=True, num_host_pages=8, token_budget=PAGE_SIZE)
    request = engine_request(name, PROMPT, stop=STOP)
    board(world, request)
    run_to_the_end(world)
    return world, request


def damage(world: TinyDecode, request: EngineRequest, index: int) -> PageId:
    page = world.cache.page_of(keys_of(request)[index])
    world.memory.page(page)[3] ^= 1
    return page


def test_an_import_keeps_the_announced_digests_and_hashes_nothing_again(monkeypatch: pytest.MonkeyPatch):
    world = tiny_decode(digests=True, num_host_pages=0, token_budget=PAGE_SIZE)
    monkeypatch.setattr(PoolHasher, "digests", lambda *_: pytest.fail("the digest was announced and matched"))
    request = engine_request("r", PROMPT, stop=STOP)
    effects = read_all(world, request, start(world, request))
    assert any(isinstance(effect, ConfirmCommit) for effect in effects)
    pages = [world.cache.page_of(key) for key in keys_of(request)]
    assert tuple(map(world.cache.pool.digests.digest, pages)) == true_digests(request.tokens, 0, 2)


def test_a_rows_own_page_is_hashed_when_it_is_full():
    world, request = served()
    (_, _, own, *_) = page_keys((*PROMPT, *expected_output(request)), PAGE_SIZE, "")
    page = world.cache.page_of(own)
    assert [world.cache.pool.digests.digest(page)] == list(PoolHasher(world.memory).digests([page]))


def test_the_pages_that_a_step_fills_are_hashed_in_one_batch(monkeypatch: pytest.MonkeyPatch):
    world = tiny_decode(digests=True, num_host_pages=0, token_budget=PAGE_SIZE)
    for name in ("one", "two"):
        board(world, engine_request(name, [*PROMPT[:2], int(name == "two")], stop=StopParams(max_tokens=3)))
    calls: list[int] = []
    hash_pages = PoolHasher.digests

    def record(self: PoolHasher, pages: Sequence[PageId]) -> tuple[int, ...]:
        calls.append(len(pages))
        return hash_pages(self, pages)

    monkeypatch.setattr(PoolHasher, "digests", record)
    run_to_the_end(world)
    assert calls == [2]


def test_a_row_joins_only_when_its_matched_pages_were_checked():
    world, _ = served()
    again = engine_request("again", PROMPT, stop=STOP)
    read_all(world, again, start(world, again))
    assert not world.scheduler.num_rows
    assert world.import_policy.next_wakeup(1.0) == 1.0
    effects = world.import_policy.check_pages(1.0)
    assert any(isinstance(effect, ConfirmCommit) for effect in effects)
    assert [*world.scheduler.ids()] == [again.id]


@pytest.mark.parametrize("index", [0, 1])
def test_no_row_starts_over_a_matched_page_that_was_damaged(index: int):
    world, first = served()
    damage(world, first, index)
    again = engine_request("again", PROMPT, stop=STOP)
    read_all(world, again, start(world, again))
    error = failures(world.import_policy.check_pages(0.0))[again.id]
    assert isinstance(error, IntegrityFailure)
    assert error.verdict is PageVerdict.PULLER
    assert world.cache.num_matching(keys_of(first)) == index, "the page left with its descendants"
    retry = engine_request("again", PROMPT, attempt=2, stop=STOP)
    board(world, retry)
    tokens = [t.token for e in run_to_the_end(world) if isinstance(e, EmitTokens) for t in e.tokens]
    assert tokens == expected_output(retry)[1:]
    assert_idle(world.cache)


def test_no_local_prompt_starts_over_a_damaged_page():
    world, first = served()
    damage(world, first, 1)
    again = engine_request("again", PROMPT, stop=STOP)
    effects = world.import_policy.claim(reserve(world, again).id, again, None, 9.0)
    assert isinstance(failures(effects)[again.id], IntegrityFailure)
    assert not world.scheduler.num_rows


def preempted() -> tuple[TinyDecode, EngineRequest, EngineRequest]:
    world = tiny_decode(digests=True, num_host_pages=8, token_budget=PAGE_SIZE)
    old = engine_request("old", [0, 1, 1, 0, 1, 0, 1], stop=StopParams(max_tokens=9))
    new = engine_request("new", [1, 1, 0, 1, 1, 0, 1], stop=StopParams(max_tokens=9))
    board(world, old)
    board(world, new)
    while not world.scheduler.num_preempted:
        batch = world.scheduler.schedule(0.0)
        assert batch is not None
        world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    return world, old, new


@pytest.mark.parametrize("slot", [0, 3])
def test_a_copy_that_was_damaged_in_host_memory_is_never_used(slot: int):
    """Slot 0 has a settled page, slot 3 the page that the row was filling."""
    world, old, new = preempted()
    (row,) = world.scheduler._preempted
    world.host_memory.page(row.host_slots[slot])[0] ^= 1
    effects = run_to_the_end(world)
    assert isinstance(failures(effects)[new.id], SentBack)
    assert world.scheduler.num_send_backs[SendBackReason.DAMAGED_COPY] == 1
    tokens = [t.token for e in effects if isinstance(e, EmitTokens) and e.id == old.id for t in e.tokens]
    assert tokens == expected_output(old)[-len(tokens) :]
    assert world.host.num_free == 8
    assert_idle(world.cache)


@pytest.mark.parametrize("slot", [0, 3])
def test_an_unchecked_copy_would_be_used(slot: int, monkeypatch: pytest.MonkeyPatch):
    """The planted bug of the test above."""
    monkeypatch.setattr(SwapSpace, "is_intact", lambda *_: True)
    world, *_ = preempted()
    (row,) = world.scheduler._preempted
    world.host_memory.page(row.host_slots[slot])[0] ^= 1
    with pytest.raises(Broken):
        run_to_the_end(world)


def test_digests_move_to_host_memory_and_back():
    world, _, new = preempted()
    (row,) = world.scheduler._preempted
    kept = world.host.digests(row.host_slots)
    assert list(PoolHasher(world.host_memory).digests([PageId(slot) for slot in row.host_slots])) == kept
    resumed: list[int] = []
    while not resumed:
        batch = world.scheduler.schedule(0.0)
        assert batch is not None
        resumed = [page for copy in batch.copies if not copy.to_host for page in copy.pages]
        world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    full = [PageId(page) for page in resumed[: row.num_filled // PAGE_SIZE]]
    digests = world.cache.pool.digests
    assert [digests.digest(page) for page in full if digests.is_settled(page)] == kept[: len(full)]
    assert new.id in world.scheduler.ids()


def test_pages_that_mismatch_twice_are_named_to_their_source():
    world = tiny_decode(digests=True, num_host_pages=0, token_budget=PAGE_SIZE)
    request = engine_request("r", PROMPT, stop=STOP)
    (first, *_) = start(world, request)
    assert isinstance(first, Pull)
    (again, *_) = world.import_policy.on_pull_event(PullEvent(first, PullOutcome.CORRUPT, 64, 0.1, "", (1,)), 0.0)
    assert isinstance(again, Pull)
    (asked,) = world.import_policy.on_pull_event(PullEvent(again, PullOutcome.CORRUPT, 64, 0.1, "", (0,)), 0.0)
    assert isinstance(asked, AskVerdict)
    assert asked.suspects == (Suspect(1, PageId(1), true_digests(request.tokens, 1, 2)[0]),)
    assert request.id not in world.imports.ids()
    (failed,) = world.import_policy.on_verdict(request.id, PageVerdict.LINK, asked.message)
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, IntegrityFailure)
    assert failed.error.verdict is PageVerdict.LINK


def test_keys_from_a_source_end_running_rows_and_leave_the_cache():
    world = tiny_decode(digests=True, num_host_pages=8, token_budget=PAGE_SIZE)
    request = engine_request("r", PROMPT, stop=STOP)
    board(world, request)
    error = failures(world.import_policy.on_keys_quarantined(SOURCE, keys_of(request)[:1]))[request.id]
    assert isinstance(error, IntegrityFailure)
    assert not len(world.cache)
    assert_idle(world.cache)


def test_keys_from_a_source_end_imports_that_read_their_descendants():
    world = tiny_decode(digests=True, num_host_pages=8, token_budget=PAGE_SIZE)
    request = engine_request("r", PROMPT, stop=STOP)
    start(world, request)
    assert request.id in failures(world.import_policy.on_keys_quarantined(SOURCE, keys_of(request)[:1]))


def test_an_import_does_not_cache_what_its_source_has_quarantined():
    """Proven pages of an aborted import enter the cache: the quarantined one and its descendants must not."""
    world = tiny_decode(digests=True, num_host_pages=8, token_budget=PAGE_SIZE)
    request = engine_request("r", PROMPT, stop=STOP)
    (read, *_) = start(world, request)
    assert isinstance(read, Pull)
    assert len(read.local_pages) == 2
    world.import_policy.on_pull_event(PullEvent(read, PullOutcome.DONE, 64, 0.1), 0.0)
    first, second, *_ = keys_of(request)
    assert request.id in failures(world.import_policy.on_keys_quarantined(SOURCE, [second]))
    assert world.cache.find(first) is not None
    assert world.cache.find(second) is None


def test_keys_from_a_source_spare_imports_from_another():
    world = tiny_decode(digests=True, num_host_pages=8, token_budget=PAGE_SIZE)
    request = engine_request("r", PROMPT, stop=STOP)
    effects = start(world, request)
    assert not world.import_policy.on_keys_quarantined(WorkerId("prefill-1"), keys_of(request)[:1])
    assert any(isinstance(effect, ConfirmCommit) for effect in read_all(world, request, effects))


def test_keys_from_a_source_end_preempted_rows():
    world, _, new = preempted()
    assert new.id in failures(world.import_policy.on_keys_quarantined(SOURCE, keys_of(new)[:1]))
    assert world.host.num_free == 8


def test_keys_from_a_source_end_rows_that_came_back():
    world, old, new = preempted()
    world.import_policy.abort(old.id)
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    assert [row.id for row in batch.rows] == [new.id]
    world.cache.clear()  # the copy is the only one
    assert world.cache.find(keys_of(new)[0]) is None
    assert new.id in failures(world.import_policy.on_keys_quarantined(SOURCE, keys_of(new)[:1]))
    assert not world.scheduler.num_rows
    assert_idle(world.cache)


def test_a_page_that_rots_in_the_pool_ends_the_row_that_holds_it():
    world = tiny_decode(digests=True, num_host_pages=8, token_budget=PAGE_SIZE)
    request = engine_request("r", PROMPT, stop=STOP)
    board(world, request)
    page = damage(world, request, 0)
    assert request.id in failures(world.import_policy.on_wrong_pages([page], 0.0))
    assert_idle(world.cache)


def test_a_page_that_rots_before_its_import_is_committed_is_not_cached():
    world = tiny_decode(digests=True, num_host_pages=8, token_budget=PAGE_SIZE)
    request = engine_request("r", PROMPT, stop=STOP)
    (first, *_) = start(world, request)
    assert isinstance(first, Pull)
    world.import_policy.on_pull_event(PullEvent(first, PullOutcome.DONE, 64, 0.1), 0.0)
    kv_import = world.imports.get(request.id)
    assert kv_import is not None
    assert request.id in failures(world.import_policy.on_wrong_pages([kv_import.table.pages[0]], 0.0))
    assert not len(world.cache)


def test_a_duplicate_is_replaced_by_an_intact_page_only():
    """A row's own page gives way to a cached one with the same key, unless that one was damaged meanwhile."""
    world, first = served()
    again = engine_request("again", PROMPT, stop=STOP)
    page = world.cache.page_of(keys_of(first)[1])
    (own,) = world.cache.allocate(1, Hold.LIVE) or []
    world.memory.page(own)[:] = world.memory.page(page)
    world.memory.page(page)[0] ^= 1
    keys = keys_of(again)
    (root,) = world.cache.match(keys[:1], Hold.LIVE)
    assert world.cache.insert(keys[0], keys[1:], [own], Hold.LIVE) == []
    assert world.cache.take_wrong() == [page]
    world.import_policy.on_wrong_pages([page], 0.0)
    assert world.cache.insert(keys[0], keys[1:], [own], Hold.LIVE) == [own]
    assert world.cache.num_matching(keys) == 2
    world.cache.pool.drop([own, root], Hold.LIVE)
    assert_idle(world.cache)
