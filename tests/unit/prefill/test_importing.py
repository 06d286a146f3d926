"""A prompt that waits for pages of another worker: bounded, beside the others, and with nothing computed twice."""

from __future__ import annotations

from baton.domain.errors import DeadlineExceeded
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.worker import WorkerRole
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.import_effects import AbortHandoff, AskExport, ConfirmCommit
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.page_imports import PageImportLimits, PageImports
from baton.engine.handoff.page_source import MAX_WAIT_S, ImportCostModel, PageSource
from baton.engine.messages import Fail
from baton.kv.events.event import CacheEvent, StoredEvent
from baton.kv.events.source import EventSource
from baton.kv.keys import page_keys
from baton.kv.page_checks import PageChecks
from baton.services.prefill.page_sharing import PageSharing
from baton.services.prefill.policy import PrefillLimits
from baton.services.prefill.scheduler import PrefillEffect, PrefillScheduler
from baton.settings.choices import PageSharingKind
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import (
    PAGE_BYTES,
    PAGE_SIZE,
    TinyPrefill,
    assert_idle,
    engine_request,
    page_bytes,
    tiny_prefill,
    true_digests,
)

LEASE_S = 5.0
PROMPT = [0, 1, 1, 0, 1, 0, 0, 1, 1]
NUM_PAGES = 4
SOURCE = PageSource(WorkerId("decode-0"), Incarnation(1), WorkerRole.DECODE, NUM_PAGES, 1e9)


class World:
    """One prefill scheduler that may import."""

    def __init__(self) -> None:
        self.tiny: TinyPrefill = tiny_prefill(LEASE_S)
        cache = self.tiny.cache
        costs = ImportCostModel(PageSharingKind.ALWAYS, PAGE_BYTES, lambda num_pages, first: 0.0)
        self.imports = PageImports(cache, PageImportLimits(6, 4, 1.0), costs)
        limits = PrefillLimits(PAGE_SIZE, 4 * PAGE_SIZE, 2, 8)
        self.exports: ExportTable = self.tiny.exports
        sharing = PageSharing(imports=self.imports)
        self.scheduler = PrefillScheduler(cache, self.exports, limits, PageChecks(cache), None, sharing)
        self.now = 0.0

    def add(self, name: str, prompt: list[int], source: PageSource | None = None, deadline: float = 60.0) -> None:
        assert not self.scheduler.add(engine_request(name, prompt), 0, deadline, self.now, source, self.now)

    def turn(self) -> list[PrefillEffect]:
        effects = self.scheduler.expire(self.now)
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            effects += self.scheduler.commit(batch, self.tiny.runner.run(batch), self.now)
        return effects

    def answer(self, num_pages: int) -> Pull:
        """The source announces its first pages; returns the read."""
        (ask,) = self.imports.take_effects()
        assert isinstance(ask, AskExport)
        pages = tuple(PageId(9 + i) for i in range(num_pages))
        chunk = PublishedChunk(ask.id, 0, pages, true_digests(tuple(PROMPT), 0, num_pages))
        self.imports.on_opened(ask.id, chunk, self.now)
        (pull,) = self.imports.take_effects()
        assert isinstance(pull, Pull)
        return pull

    def complete(self, pull: Pull, outcome: PullOutcome = PullOutcome.DONE, corrupt: tuple[int, ...] = ()) -> None:
        for at, page in enumerate(pull.local_pages):
            content = bytearray(page_bytes(tuple(PROMPT), at))
            self.tiny.memory.write([page], [memoryview(content)])
        num_bytes = PAGE_BYTES * len(pull.local_pages)
        self.imports.on_pull_event(PullEvent(pull, outcome, num_bytes, 0.01, "", corrupt), self.now)


def seal_of(effects: list[PrefillEffect]) -> Seal:
    (seal,) = [one for one in effects if isinstance(one, Seal)]
    return seal


def test_a_prompt_computes_only_what_its_source_lacks():
    world, events = World(), list[CacheEvent]()
    world.tiny.cache.events = EventSource(events.extend, with_content=True)
    world.add("a", PROMPT, SOURCE)
    pull = world.answer(NUM_PAGES)
    assert world.turn() == [], "it waits"
    world.complete(pull)
    world.tiny.cache.events.flush()
    tokens = [event.content.tokens for event in events if isinstance(event, StoredEvent)]
    assert tokens == [tuple(PROMPT[start : start + PAGE_SIZE]) for start in range(0, NUM_PAGES * PAGE_SIZE, PAGE_SIZE)]
    (committed,) = world.imports.take_effects()
    assert isinstance(committed, ConfirmCommit)
    seal = seal_of(world.turn())
    assert seal.times.cached_tokens == seal.times.imported_tokens == NUM_PAGES * PAGE_SIZE
    assert seal.times.computed_tokens == 1
    assert seal.num_imported == {WorkerRole.DECODE: NUM_PAGES * PAGE_SIZE}
    world.exports.commit(seal.id)
    world.add("b", PROMPT)
    seal = seal_of(world.turn())
    assert seal.times.cached_tokens == NUM_PAGES * PAGE_SIZE
    assert seal.times.imported_tokens == 0, "an imported page is counted once"


def test_others_do_not_wait_for_an_import():
    world = World()
    world.add("a", PROMPT, SOURCE)
    world.add("b", [1, 1, 1, 1, 0])
    assert seal_of(world.turn()).id.request_id == "b"
    assert world.scheduler.num_waiting == 1


def test_a_prompt_waits_no_longer_than_its_bound():
    world = World()
    world.add("a", PROMPT, SOURCE)
    assert world.turn() == []
    assert world.scheduler.next_wakeup() == MAX_WAIT_S
    world.now = MAX_WAIT_S
    effects = world.turn()
    effects += world.turn()
    assert seal_of(effects).times.cached_tokens == 0
    asked, ended = world.imports.take_effects()
    assert isinstance(asked, AskExport)
    assert isinstance(ended, AbortHandoff)
    world.exports.commit(seal_of(effects).id)
    assert_idle(world.tiny.cache)


def test_the_pages_before_a_wrong_one_are_used():
    world = World()
    world.add("a", PROMPT, SOURCE)
    pull = world.answer(NUM_PAGES)
    world.complete(pull, PullOutcome.CORRUPT, (2,))
    (again,) = world.imports.take_effects()
    assert isinstance(again, Pull)
    assert list(again.local_pages) == [pull.local_pages[2]]
    world.imports.on_pull_event(PullEvent(again, PullOutcome.CORRUPT, PAGE_BYTES, 0.01, "", (0,)), world.now)
    (verdict,) = world.imports.take_effects()
    assert verdict.suspects[0].index == 2  # type: ignore[union-attr]
    effects = world.turn()
    assert seal_of(effects).times.imported_tokens == 2 * PAGE_SIZE
    assert seal_of(effects).times.computed_tokens == len(PROMPT) - 2 * PAGE_SIZE


def test_an_aborted_prompt_leaves_nothing():
    world = World()
    world.add("a", PROMPT, SOURCE)
    pull = world.answer(NUM_PAGES)
    assert world.scheduler.abort(engine_request("a", PROMPT).id)
    (ended,) = world.imports.take_effects()
    assert isinstance(ended, AbortHandoff)
    world.complete(pull)
    assert not len(world.imports)
    assert world.turn() == []
    assert_idle(world.tiny.cache)
    assert world.tiny.cache.num_matching(page_keys(PROMPT, PAGE_SIZE, "")) == 0


def test_the_deadline_of_a_request_ends_its_import():
    world = World()
    world.add("a", PROMPT, SOURCE, deadline=1.0)
    world.now = 1.0
    (failed,) = world.turn()
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, DeadlineExceeded)
    assert not len(world.imports)


def test_two_prompts_import_a_prefix_once():
    world = World()
    world.add("a", PROMPT, SOURCE)
    world.add("b", PROMPT, SOURCE)
    world.complete(world.answer(NUM_PAGES))
    seals = [one for one in (*world.turn(), *world.turn()) if isinstance(one, Seal)]
    assert [one.times.computed_tokens for one in seals] == [1, 1]


def test_a_source_s_key_spares_pages_computed_here():
    """The second attempt of a request whose first source was damaged must not fail on the worker that is well."""
    world = World()
    world.add("a", PROMPT)
    seal = seal_of(world.turn() + world.turn())
    assert not world.scheduler.on_keys_quarantined(page_keys(PROMPT, PAGE_SIZE, ""))
    assert world.exports.commit(seal.id), "the export is intact"
    assert world.scheduler.quarantine.since(0) == ((), 0), "nothing is passed on"


def test_a_source_s_key_fails_exports_of_imported_pages():
    world = World()
    world.add("a", PROMPT, SOURCE)
    world.complete(world.answer(NUM_PAGES))
    seal = seal_of(world.turn())
    (failed,) = world.scheduler.on_keys_quarantined(page_keys(PROMPT, PAGE_SIZE, "")[1:2])
    assert isinstance(failed, Fail)
    assert failed.id == seal.id
    assert world.tiny.cache.num_matching(page_keys(PROMPT, PAGE_SIZE, "")) == 1
