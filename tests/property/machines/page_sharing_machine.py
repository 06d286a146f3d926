"""Two caches, one that gives and one that imports, while answers are lost, reads fail and pages change or leave.

Every page's bytes follow from its key, so a wrong page in the importing cache is seen at once.
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.domain.errors import Superseded
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, Incarnation, PageId, PageKey, RequestId, WorkerId
from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import WorkerRole
from baton.engine.handoff.cached_exports import CachedExports, ExportLimits
from baton.engine.handoff.import_effects import AbortHandoff, AskExport, AskVerdict, ConfirmCommit
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.page_imports import PageImportLimits, PageImports
from baton.engine.handoff.page_source import MAX_WAIT_S, ImportCostModel, PageSource
from baton.kv.geometry import PageWindow
from baton.kv.keys import page_keys
from baton.kv.memory import PoolMemory, write_leading
from baton.kv.page_checks import PageChecks
from baton.kv.page_tags import TagVerifier
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.windows.arrival_slots import ArrivalSlots
from baton.kv.windows.memory import WindowedMemory
from baton.settings.choices import PageSharingKind
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.digest import PoolHasher, wrong_positions
from simulation.runtime.page_memory import SimMemory
from tests.tiny_workers import assert_idle, check_invariants

NUM_PAGES, PAGE_BYTES, PAGE_SIZE = 8, 16, 2
LEASE_S = 5.0
MAX_GIVEN, MAX_IMPORTED = 3, 5
SOURCE = WorkerId("decode-0")
CHAINS = ((0,) * 14, (0,) * 4 + (1,) * 10, (1,) * 14)
"""Three prompts of seven pages; the first two begin alike."""

prompts = st.tuples(st.sampled_from(CHAINS), st.integers(1, 7))


def content(key: PageKey) -> bytes:
    return key[:PAGE_BYTES].ljust(PAGE_BYTES, b"\1")


class Cache:
    """One worker's pool with its cache. `num_slots`: of window parts, which repeat their pages; None: none."""

    def __init__(self, num_slots: int | None = None) -> None:
        self.memory: PoolMemory = SimMemory(NUM_PAGES, PAGE_BYTES)
        pool = PagePool(NUM_PAGES)
        if num_slots is not None:
            self.memory = WindowedMemory(SimMemory(NUM_PAGES, PAGE_BYTES), SimMemory(num_slots, PAGE_BYTES))
            self.memory.join(pool)
        self.cache = PrefixCache(pool, PoolHasher(self.memory))
        self.cache.window = None if num_slots is None else PageWindow(3, PAGE_SIZE, 1)

    def fill(self, keys: list[PageKey]) -> None:
        """Computes the pages of a prompt as far as there is room, page by page."""
        held = self.cache.match(keys, Hold.LIVE)
        new = self.cache.allocate(min(len(keys) - len(held), self.cache.num_available), Hold.LIVE) or []
        parent = keys[len(held) - 1] if held else None
        for at, (page, key) in enumerate(zip(new, keys[len(held) :], strict=False)):
            slots = ArrivalSlots(self.cache)
            slots.take([page], len(held) + at, lambda at: True)
            self.memory.write([page], [memoryview(bytearray(content(key) * len(self.memory.part_ends)))])
            used = self.cache.insert(parent, [key], [page], Hold.LIVE)
            slots.follow([page], used)
            slots.drop(used or [page])
            new[at : at + len(used)] = used
            if not used:
                break
            parent = key
        self.cache.pool.drop([*held, *new], Hold.LIVE)


class PageSharingMachine(RuleBasedStateMachine):
    """`giver` exports to `taker`, whose `imports` are under test. Tests may replace the classes."""

    cached_exports: ClassVar[type[CachedExports]] = CachedExports
    page_imports: ClassVar[type[PageImports]] = PageImports
    num_window_slots: ClassVar[int | None] = None

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.giver, self.taker = Cache(self.num_window_slots), Cache(self.num_window_slots)
        self.num_reserved = 0
        self.exports = ExportTable(self.giver.cache.pool, LEASE_S)
        limits = ExportLimits(MAX_GIVEN, lambda: self.giver.cache.num_available - self.num_reserved)
        self.checks = PageChecks(self.giver.cache)
        self.given = self.cached_exports(self.giver.cache, self.exports, self.checks, limits)
        costs = ImportCostModel(PageSharingKind.ALWAYS, PAGE_BYTES, lambda num_pages, first: 0.0)
        self.imports = self.page_imports(self.taker.cache, PageImportLimits(MAX_IMPORTED, 2, 1.0), costs)
        self.asked: list[AskExport] = []
        self.answers: list[PublishedChunk] = []
        self.reads: list[Pull] = []
        self.waiting: dict[AttemptId, float] = {}
        self.num_prompts = 0
        self.num_leading = 0  # reads of pages without their window parts

    @rule(prompt=prompts, to_giver=st.booleans())
    def compute(self, prompt: tuple[tuple[int, ...], int], to_giver: bool) -> None:
        tokens, num_pages = prompt
        (self.giver if to_giver else self.taker).fill(page_keys(tokens, PAGE_SIZE, "")[:num_pages])

    @rule(num_pages=st.integers(0, 4))
    def reserve(self, num_pages: int) -> None:
        """Rows and reservations of the giver count on some of its pages."""
        self.num_reserved = min(num_pages, self.giver.cache.num_available)

    @rule(prompt=prompts)
    def begin(self, prompt: tuple[tuple[int, ...], int]) -> None:
        tokens, num_pages = prompt
        self.num_prompts += 1
        id = AttemptId(RequestId(f"r{self.num_prompts}"), 1)
        source = PageSource(SOURCE, Incarnation(1), WorkerRole.DECODE, num_pages, 1e9)
        if self.imports.begin(id, page_keys(tokens, PAGE_SIZE, ""), source, self.now):
            self.waiting[id] = self.now
        self.perform()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), arrives=st.booleans(), again=st.booleans())
    def answer(self, data: st.DataObject, arrives: bool, again: bool) -> None:
        """The giver gets a question; its answer may be lost, and the question come twice."""
        ask = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        for page in self.given.find_wrong(ask.keys):
            self.giver.cache.quarantine(self.giver.cache.key_of(page))  # type: ignore[arg-type]
        num_free = self.giver.cache.num_available - self.num_reserved
        chunk = self.given.open(ask.id, ask.keys, ask.first_page, self.now)
        assert self.giver.cache.num_available - self.num_reserved >= min(0, num_free), "reserved pages stay available"
        if again and chunk.pages:
            try:
                self.given.open(ask.id, ask.keys, ask.first_page, self.now)
            except Superseded:
                pass
            else:
                raise AssertionError("one attempt has two exports")
        if arrives:
            self.imports.on_opened(ask.id, chunk, self.now)
        self.perform()

    @rule(prompt=prompts)
    def import_without_faults(self, prompt: tuple[tuple[int, ...], int]) -> None:
        """The giver computes a prompt, and the taker imports it at once."""
        self.compute(prompt, True)
        before = list(self.asked)
        self.begin(prompt)
        for ask in [one for one in self.asked if one not in before]:
            self.asked.remove(ask)
            self.imports.on_opened(ask.id, self.given.open(ask.id, ask.keys, ask.first_page, self.now), self.now)
            self.perform()
            while mine := [pull for pull in self.reads if self.imports._by_pull.get(pull.id) is not None]:
                self.end_read(mine[0], "done")

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "done", "corrupt", "failed", "late"]))
    def read(self, data: st.DataObject, outcome: str) -> None:
        self.end_read(self.reads[data.draw(st.integers(0, len(self.reads) - 1))], outcome)

    def end_read(self, pull: Pull, outcome: str) -> None:
        if outcome == "late":
            return self.deliver(PullEvent(pull, PullOutcome.LATE, 0, 1.0))
        self.reads.remove(pull)
        if outcome == "failed":
            return self.deliver(PullEvent(pull, PullOutcome.FAILED, 0, 0.1))
        memory, num_bytes, found = self.taker.memory, pull.page_bytes(self.taker.memory), dict[int, int]()
        for at, (remote, local) in enumerate(zip(pull.remote_pages, pull.local_pages, strict=True)):
            data_of_page = bytearray(self.giver.memory.read([remote], num_bytes)[0])
            if outcome == "corrupt" and at == 0:
                data_of_page[0] ^= 1
            write_leading(memory, [local], [memoryview(data_of_page)])
        every = slice(0, len(pull.local_pages))
        corrupt = wrong_positions(memory, pull, every, TagVerifier(OPEN_CLUSTER), found)
        self.num_leading += pull.num_parts is not None
        kind = PullOutcome.CORRUPT if corrupt else PullOutcome.DONE
        total = PAGE_BYTES * len(pull.local_pages)
        self.deliver(PullEvent(pull, kind, total, 0.1, "", tuple(corrupt), tuple(found.values())))

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def rot(self, page: int) -> None:
        """A settled page of the giver changes."""
        if self.giver.cache.pool.digests.is_settled(PageId(page)):
            changed = bytearray(self.giver.memory.read([PageId(page)])[0])
            changed[PAGE_BYTES - 1] ^= 1
            self.giver.memory.write([PageId(page)], [memoryview(changed)])

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """The giver has taken out a page, which the taker learns."""
        key = data.draw(st.sampled_from([key for tokens in CHAINS for key in page_keys(tokens, PAGE_SIZE, "")]))
        self.giver.cache.quarantine(key)
        self.taker.cache.quarantine(key)
        self.imports.on_keys_quarantined([key])
        self.perform()

    @rule()
    def replace(self) -> None:
        self.imports.on_source_replaced(SOURCE, self.now)
        self.perform()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.waiting, key=str)))
        self.imports.abort(id)
        self.waiting.pop(id)
        self.perform()

    @rule(seconds=st.sampled_from([0.1, MAX_WAIT_S, LEASE_S + 0.1]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.imports.expire(self.now)
        self.exports.expire(self.now)
        self.perform()

    def deliver(self, event: PullEvent) -> None:
        self.imports.on_pull_event(event, self.now)
        self.perform()

    def perform(self) -> None:
        """Obeys the effects, and takes the prompts whose wait is over."""
        for effect in self.imports.take_effects():
            match effect:
                case AskExport():
                    self.asked.append(effect)
                case Pull():
                    self.reads.append(effect)
                case ConfirmCommit(id):
                    self.exports.commit(id)
                case AbortHandoff(id):
                    self.exports.release(id)
                case AskVerdict(id, _, suspects):
                    _, wrong = self.given.examine(id, suspects)
                    self.exports.release(id)
                    for page in wrong:
                        if (key := self.giver.cache.key_of(page)) is not None:
                            self.giver.cache.quarantine(key)
        for id in self.imports.take_ended():
            self.waiting.pop(id, None)
        for id in self.exports.condemned():
            self.exports.release(id)

    @invariant()
    def pages_agree(self) -> None:
        if not hasattr(self, "giver"):
            return
        for side in (self.giver, self.taker):
            check_invariants(side.cache)
        taker = self.taker
        for tokens in CHAINS:
            for key in page_keys(tokens, PAGE_SIZE, ""):
                if (page := taker.cache.find(key)) is not None:
                    leading, *windows = taker.memory.parts([page])[0]
                    assert bytes(leading) == content(key), "no wrong page is ever cached"
                    assert all(bytes(window) in (b"", content(key)) for window in windows)
        in_flight = [page for pull in self.reads for page in pull.local_pages]
        assert len(set(in_flight)) == len(in_flight)
        for page in in_flight:
            assert taker.cache.pool.owner(page).name in ("RESERVED", "DRAINING"), "a read writes only pages of imports"
        assert all(self.now < since + MAX_WAIT_S for since in self.waiting.values()), "no wait is longer"

    def teardown(self) -> None:
        if not hasattr(self, "giver"):
            return
        self.pass_time(LEASE_S + 0.1)
        assert not self.waiting
        for pull in list(self.reads):
            self.reads.remove(pull)
            self.deliver(PullEvent(pull, PullOutcome.FAILED, 0, 9.0))
        assert not len(self.imports)
        assert not len(self.exports)
        for side in (self.giver, self.taker):
            assert_idle(side.cache)
