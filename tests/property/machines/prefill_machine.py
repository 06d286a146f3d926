"""State machine of the prefill scheduler and its exports, checked by a model that sees only the effects."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.domain.errors import ContextOverflow, DeadlineExceeded, IntegrityFailure, LeaseEnded, Superseded
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId
from baton.domain.request import EngineRequest, StopParams
from baton.domain.timing.step_time import StepTimeModel
from baton.engine.batch import Batch, Row
from baton.engine.handoff.export_events import ExportExpired, Seal
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.messages import Fail
from baton.kv.pages import Owner, PagePool
from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from baton.services.prefill.prompt import Progress
from baton.services.prefill.scheduler import PrefillEffect, PrefillScheduler
from baton.transfer.digest import page_digest
from simulation.runtime.page_memory import SimMemory
from tests.tiny_workers import (
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_SIZE,
    TinyPrefill,
    assert_idle,
    check_invariants,
    engine_request,
    next_token,
    num_pages,
    page_bytes,
    tiny_prefill,
)

LEASE_S = 3.0
TOKEN_BUDGET = 2 * PAGE_SIZE
MAX_PINNED_PAGES = 4
MAX_CHUNKING = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=PAGE_SIZE * NUM_PAGES)
TOO_LONG = [0] * (PAGE_SIZE * NUM_PAGES + 1)


@dataclass
class Case:
    """Expected state of one attempt."""

    request: EngineRequest
    deadline: float
    next_page: int  # the first that is not published
    started: bool = False
    ended: bool = False  # sealed, failed or aborted
    sealed: bool = False
    exported: bool = True  # its pins are held
    committed: bool = False
    lease_ends_at: float | None = None
    num_computed: int = 0
    pages: dict[int, PageId] = field(default_factory=dict)  # index in the prompt -> published page


def shares_pages(request: EngineRequest, other: EngineRequest) -> bool:
    """True if the second prompt has a full page of the first."""
    return request.salt == other.salt and request.tokens[:PAGE_SIZE] == other.tokens[:PAGE_SIZE]


class PrefillMachine(RuleBasedStateMachine):
    """Rules are actions of a router, a decode worker and the clock."""

    export_table: type[ExportTable] = ExportTable
    prefill_scheduler: type[PrefillScheduler] = PrefillScheduler
    long_prompt_tokens = 0
    order = PolicySettings()
    equal_time: StepTimeModel | None = None
    num_window_slots: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.world = self._new_world()
        self.token_budget = TOKEN_BUDGET
        self.now = 0.0
        self.cases: dict[AttemptId, Case] = {}
        self.names = itertools.count()

    def _new_world(self) -> TinyPrefill:
        memory, pool = self._parts()
        return tiny_prefill(
            LEASE_S, TOKEN_BUDGET, MAX_PINNED_PAGES, MAX_CHUNKING, self.export_table, self.prefill_scheduler,
            long_prompt_tokens=self.long_prompt_tokens, order=self.order, equal_time=self.equal_time,
            memory=memory, pool=pool, num_window_slots=self.num_window_slots,
        )  # fmt: skip

    # -- actions

    @rule(
        prompt=PROMPTS,
        num_decode_pages=st.integers(0, 3), timeout_s=st.integers(1, 30), salt=st.sampled_from(["", "s"]),
        max_tokens=st.integers(1, 2),
    )  # fmt: skip
    def add(self, prompt: list[int], num_decode_pages: int, timeout_s: int, salt: str, max_tokens: int) -> None:
        name, stop = f"r{next(self.names)}", StopParams(max_tokens)
        request = engine_request(name, prompt, stop=stop, salt=salt, priority=timeout_s % 3 - 1)
        self._add(request, num_decode_pages, timeout_s)

    @precondition(lambda self: self.cases)
    @rule(data=st.data(), prompt=PROMPTS)
    def add_newer_attempt(self, data: st.DataObject, prompt: list[int]) -> None:
        older = self._draw(data, list(self.cases))
        newest = max(id.attempt for id in self.cases if id.request_id == older.request_id)
        self._add(engine_request(older.request_id, prompt, attempt=newest + 1), 0, 20)

    @precondition(lambda self: self.cases)
    @rule(data=st.data())
    def add_stale_attempt(self, data: st.DataObject) -> None:
        id = self._draw(data, list(self.cases))
        try:
            self.world.scheduler.add(self.cases[id].request, 0, self.now + 20)
        except Superseded:
            return
        raise AssertionError("an attempt that was seen already came in again")

    @rule()
    def add_what_can_never_fit(self) -> None:
        request = engine_request(f"r{next(self.names)}", TOO_LONG)
        effects = self.world.scheduler.add(request, 0, self.now + 20)
        assert [type(effect.error) for effect in effects if isinstance(effect, Fail)] == [ContextOverflow]

    @precondition(lambda self: self.cases)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort(self._draw(data, list(self.cases)))

    @precondition(lambda self: self.cases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(list(self.cases)), unique=True))
        ended = self.world.exports.renew(ids, self.now)
        assert set(ended) == {id for id in ids if not self.cases[id].exported}
        for id in ids:
            if self.cases[id].lease_ends_at is not None:
                self.cases[id].lease_ends_at = self.now + LEASE_S

    @precondition(lambda self: any(case.sealed for case in self.cases.values()))
    @rule(data=st.data())
    def commit_export(self, data: st.DataObject) -> None:
        id = self._draw(data, [id for id, case in self.cases.items() if case.sealed])
        case = self.cases[id]
        held = case.exported
        valid = self.world.exports.commit(id)
        assert valid == (held or case.committed), "a commit's answer must say whether the pins held"
        assert self.world.exports.commit(id) == valid  # idempotent
        case.exported, case.committed = False, valid

    @rule(dt=st.sampled_from([0.5, 1.0, 2.5]))
    def wait(self, dt: float) -> None:
        self.now += dt
        self._on_effects(self.world.scheduler.expire(self.now))
        for id, case in self.cases.items():
            late = case.lease_ends_at is not None and case.lease_ends_at <= self.now
            assert not (case.exported and late), f"{id}'s lease has run out"
            assert case.ended or case.deadline > self.now

    @rule(data=st.data(), disturbed=st.integers(0, 4))
    def step(self, data: st.DataObject, disturbed: int) -> None:
        batch = self._schedule()
        if batch is None:
            return
        output = self.world.runner.run(batch)
        if disturbed == 0:
            self._abort(data.draw(st.sampled_from(batch.rows)).id)
        self._on_effects(self.world.scheduler.commit(batch, output, self.now))

    # -- invariants

    @invariant()
    def page_counts_agree(self) -> None:
        check_invariants(self.world.cache)
        waiting = [case for case in self.cases.values() if not case.ended and not case.started]
        assert self.world.scheduler.num_waiting == len(waiting)
        exempt = self.order.policy is not PrefillPolicy.FCFS  # the oldest prompt
        assert self.world.scheduler.num_chunking <= MAX_CHUNKING + exempt
        assert len(self.world.exports) == sum(case.exported for case in self.cases.values())

    @invariant()
    def exported_pages_are_pinned_and_final(self) -> None:
        for case in self.cases.values():
            for index, page in case.pages.items() if case.exported else ():
                assert self.world.cache.pool.owner(page) in (Owner.PINNED, Owner.LIVE)
                expected = page_bytes(case.request.tokens, index)
                assert bytes(self.world.memory.page(page)[: len(expected)]) == expected

    @invariant()
    def next_wakeup_is_exact(self) -> None:
        times = [case.deadline for case in self.cases.values() if not case.ended]
        times += [c.lease_ends_at for c in self.cases.values() if c.exported and c.lease_ends_at is not None]
        assert self.world.scheduler.next_wakeup() == min(times, default=None)

    def teardown(self) -> None:
        """Ends everything by committing sealed exports: no prompt starves, no page leaks."""
        for _ in range(100 * len(self.cases) + 1):
            for id, case in self.cases.items():
                if case.sealed and case.exported:
                    case.exported = not self.world.exports.commit(id)
            batch = self._schedule()
            if batch is not None:
                self._on_effects(self.world.scheduler.commit(batch, self.world.runner.run(batch), self.now))
        assert all(case.ended and not case.exported for case in self.cases.values())
        assert_idle(self.world.cache)

    # -- helpers

    def _parts(self) -> tuple[SimMemory, PagePool]:
        """Empty, of the worker."""
        return SimMemory(NUM_PAGES, PAGE_BYTES), PagePool(NUM_PAGES)

    def _stands_still(self, rows: Sequence[Row]) -> bool:
        """True if a prompt in progress is in no step."""
        return bool(rows) != (self.world.scheduler.num_chunking > 0)

    def _draw(self, data: st.DataObject, ids: list[AttemptId]) -> AttemptId:
        return data.draw(st.sampled_from(ids))

    def _add(self, request: EngineRequest, num_decode_pages: int, timeout_s: float) -> None:
        num_decode_pages = min(num_decode_pages, (len(request.tokens) - 1) // PAGE_SIZE)
        deadline = self.now + timeout_s
        effects = self.world.scheduler.add(request, num_decode_pages * PAGE_SIZE, deadline)
        self._on_effects(effects)
        self.cases[request.id] = Case(request, deadline, num_decode_pages)
        for id, case in self.cases.items():
            if id.request_id == request.id.request_id and id != request.id:
                assert case.ended
                assert not case.exported, f"{id} was not fenced off"

    def _abort(self, id: AttemptId) -> None:
        case = self.cases[id]
        known = self.world.scheduler.abort(id)
        assert known == (case.exported or not case.ended)
        case.ended, case.exported = True, False

    def _schedule(self) -> Batch | None:
        num_pinned = self.world.cache.pool.counts()[Owner.PINNED]
        batch = self.world.scheduler.schedule(self.now)
        self._on_effects(self.world.scheduler.take_pending_effects())
        rows = batch.rows if batch is not None else ()
        assert not self._stands_still(rows), "a prompt in progress stands still"
        assert sum(len(row.tokens) for row in rows) <= self.token_budget
        begun = [self.cases[row.id] for row in rows if not self.cases[row.id].started]
        for row in rows:
            self._check_row(row, num_pinned)
        if begun:
            cases = list(self.cases.values())
            for case in cases[: max(map(cases.index, begun))]:
                if not case.started and not case.ended:
                    self._check_overtaken(case)
        return batch

    def _check_row(self, row: Row, num_pinned: int) -> None:
        case = self.cases[row.id]
        end = row.start + len(row.tokens)
        assert tuple(row.tokens) == case.request.tokens[row.start : end]
        assert (row.sample is not None) == (end == len(case.request.tokens))
        assert row.sample is not None or end % PAGE_SIZE == 0, "a chunk that is not the last ends inside a page"
        if not case.started:
            assert num_pinned < MAX_PINNED_PAGES, "a prompt began beyond the pin budget"
            case.started = True
        case.num_computed += len(row.tokens)

    def _check_overtaken(self, case: Case) -> None:
        """Under fcfs a prompt is overtaken only while one in progress fills pages that it needs."""
        if self.order.policy is PrefillPolicy.FCFS:
            others = [other.request for other in self.cases.values() if other.started and not other.ended]
            assert any(shares_pages(case.request, other) for other in others), "a prompt overtook another"

    def _on_effects(self, effects: list[PrefillEffect]) -> None:
        for effect in effects:
            assert effect.id in self.cases, "an effect for a prompt that has ended"
            case = self.cases[effect.id]
            match effect:
                case PublishedChunk(_, first_page, pages, digests):
                    self._check_digests(case, first_page, pages, digests)
                    assert not case.ended
                    assert first_page == case.next_page
                    assert pages
                    case.pages |= dict(enumerate(pages, first_page))
                    case.next_page += len(pages)
                    case.lease_ends_at = self.now + LEASE_S if case.lease_ends_at is None else case.lease_ends_at
                case Progress(_, num_tokens):
                    assert num_tokens % PAGE_SIZE == 0
                    assert not case.ended
                case Seal():
                    self._on_seal(case, effect)
                case Fail(id, error):
                    assert isinstance(error, Superseded | DeadlineExceeded | LeaseEnded | IntegrityFailure)
                    assert case.exported or not case.ended, f"{id} ended twice"
                    assert case.sealed <= isinstance(error, Superseded | IntegrityFailure)
                    case.ended, case.exported = True, False
                case ExportExpired():
                    assert case.sealed
                    assert case.exported
                    case.exported = False

    def _check_digests(
        self, case: Case, first_page: int, pages: tuple[PageId, ...], digests: tuple[int, ...] | None
    ) -> None:
        """Announced digests are those of the true bytes, whatever has happened to the pages since."""
        assert digests is not None
        for index, page, digest in zip(range(first_page, first_page + len(pages)), pages, digests, strict=True):
            expected = page_bytes(case.request.tokens, index)
            if len(expected) == PAGE_BYTES:
                assert digest == page_digest(memoryview(expected))
                assert digest == self.world.cache.pool.digests.digest(page)
            assert self.world.exports.announced(case.request.id)[page] == digest

    def _on_seal(self, case: Case, seal: Seal) -> None:
        request = case.request
        assert not case.ended
        assert case.next_page == seal.num_pages == num_pages(len(request.tokens))
        assert (seal.first_token.token, seal.finish) == next_token(request, list(request.tokens))
        assert seal.index == request.num_emitted
        assert seal.times.computed_tokens == case.num_computed == len(request.tokens) - seal.times.cached_tokens
        case.ended = case.sealed = True
