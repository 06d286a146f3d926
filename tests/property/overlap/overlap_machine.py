"""Decode's side with an `OverlapScheduler` and a device that runs late. Any rule may come between two steps."""

from __future__ import annotations

from typing import Protocol

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.engine.batch import Batch
from baton.engine.overlap.fake_async_runner import FakeAsyncRunner, FakeStep
from baton.kv.growth import GrowthPolicy, GrowthReserve
from baton.kv.pages import Owner, PagePool
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.rows.unsettled_pages import UnsettledPages, UnsettledRows
from baton.services.decode.scheduler import DecodeScheduler
from simulation.runtime.page_memory import SimMemory
from tests.property.machines.decode_checks import MAX_ROWS, TOKEN_BUDGET
from tests.property.machines.decode_machine import MAX_OUTPUT, PROMPTS, DecodeMachine
from tests.property.overlap.late_digester import GuardedMemory, LateDigester
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, TinyDecode, tiny_decode


class PageReader(Protocol):
    """Reads pages beside the engine thread."""

    @property
    def pages(self) -> frozenset[PageId]: ...


class WatchedPool(PagePool):
    """Raises `Broken` as soon as a page can be reused while a step of `device` that is in flight may touch it."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.device: FakeAsyncRunner | None = None
        self.digester: PageReader | None = None

    def _update_owner(self, page: PageId) -> None:
        super()._update_owner(page)
        reusable = self.owner(page) in (Owner.FREE, Owner.CACHED, Owner.RETIRED)
        if reusable and self.device is not None and page in self.device.pages:
            raise Broken(f"page {page} is {self.owner(page).name} while a step in flight may touch it")
        if reusable and self.digester is not None and page in self.digester.pages:
            raise Broken(f"page {page} is {self.owner(page).name} while it is hashed")


class OverlapMachine(DecodeMachine):
    """Every rule of `DecodeMachine` may come while a step is in flight, and the device runs it at any moment."""

    decode_scheduler: type[DecodeScheduler] = OverlapScheduler
    num_ahead = 0
    """Steps that were started before the result of the one before was taken, over all examples."""

    def _new_world(self, digests: bool, num_host_pages: int, mode: GrowthPolicy = GrowthPolicy.NONE) -> TinyDecode:
        pool = WatchedPool(NUM_PAGES)
        world = tiny_decode(
            digests, num_host_pages, MAX_ROWS, 2, self.import_table, self.decode_scheduler, self.import_policy,
            TOKEN_BUDGET, self.page_faults, GrowthReserve(mode, PAGE_SIZE, 6), order=self.order, pool=pool,
            num_window_slots=self.num_window_slots, memory=self._new_memory(),
        )  # fmt: skip
        assert isinstance(world.scheduler, OverlapScheduler)
        self.ahead = world.scheduler
        self.device = pool.device = FakeAsyncRunner(world.runner)
        self.in_flight: tuple[Batch, FakeStep] | None = None
        return world

    def _new_memory(self) -> SimMemory | None:
        return None

    @rule()
    def device_runs(self) -> None:
        self.device.advance()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def take_the_result_early(self, data: st.DataObject) -> None:
        """A turn that starts nothing."""
        self._take(self.in_flight)
        self.in_flight = None

    @invariant()
    def pages_wait_only_for_steps_in_flight(self) -> None:
        assert self.ahead._fence.num_in_flight == self.ahead.num_in_flight == (self.in_flight is not None)
        assert self.in_flight or self.ahead._fence.num_pages == 0

    def _step(self, disturbed: int | None) -> None:
        before, num_rows = self.in_flight, self.world.scheduler.num_rows
        batch = self.ahead.schedule_ahead(self.now)
        assert before or batch is None
        if batch is None:
            self._take(before)
            self.in_flight, before = None, None
            batch = self.ahead.schedule(self.now)
        else:
            type(self).num_ahead += 1
        if batch is not None:
            assert self.world.scheduler.num_recomputed_tokens(batch) == 0
            self.in_flight = (batch, self.device.start(batch))
            if disturbed is not None and batch.rows:
                id = batch.rows[disturbed % len(batch.rows)].id
                self._on_effects(self.world.import_policy.abort(id))
                self.cases[id].ended = True
        self._take(before)
        if self.in_flight is None:
            self.ahead.settle_filled()
        self._on_effects(self.world.scheduler.take_pending_effects())
        waits_for_pages = len(self.world.imports) + self.world.imports.num_draining > 0
        moved = batch is not None or self.world.scheduler.num_rows < num_rows
        assert moved or num_rows == 0 or waits_for_pages, "rows stand still without any other work"

    def _idle_pages(self) -> list[tuple[SimMemory, int]]:
        """No page under a step in flight either: it checks what it reads, also of a row that was aborted."""
        busy = self.device.pages
        return [(at, page) for at, page in super()._idle_pages() if at is not self.world.memory or page not in busy]

    def _take(self, started: tuple[Batch, FakeStep] | None) -> None:
        if started is not None:
            batch, step = started
            self._on_effects(self.world.scheduler.commit(batch, step.result(), self.now))


class CountedRows(UnsettledRows):
    """Counts rows that ended before their pages had digests."""

    num_kept = 0

    def take(self) -> list[UnsettledPages]:
        taken = super().take()
        self.num_kept += sum(one.has_ended for one in taken)
        return taken


class DecodeDigestingMachine(OverlapMachine):
    """Pages of a step are hashed at any moment between its commit and that of the next one, and not by the engine."""

    num_late = 0
    """Pages that were hashed beside, over all examples."""
    num_kept = 0
    """Rows that ended before their pages had digests."""

    def _new_memory(self) -> SimMemory:
        self.memory = GuardedMemory()
        return self.memory

    def _new_world(self, digests: bool, num_host_pages: int, mode: GrowthPolicy = GrowthPolicy.NONE) -> TinyDecode:
        world = super()._new_world(digests, num_host_pages, mode)
        pool = world.cache.pool
        assert isinstance(pool, WatchedPool)
        self.memory.device = self.device
        self.digester = pool.digester = self.memory.digester = LateDigester(self.memory)
        self.ahead.unsettled = self.rows = CountedRows(self.digester) if digests else None
        return world

    @rule(prompt=PROMPTS, seed=st.integers(0, 3), num_steps=st.integers(2, MAX_OUTPUT))
    def import_and_run(self, prompt: list[int], seed: int, num_steps: int) -> None:
        """So that rows fill pages."""
        self.import_without_faults(prompt, MAX_OUTPUT, seed)
        for _ in range(num_steps):
            self._step(None)
            self.what_is_hashed_is_not_cached()

    @rule()
    def digester_runs(self) -> None:
        self.digester.advance()

    @rule()
    def take_the_digests_early(self) -> None:
        self.ahead.settle_filled()

    @invariant()
    def what_is_hashed_is_not_cached(self) -> None:
        pages = self.digester.pages
        assert all(self.world.cache.key_of(page) is None for page in pages)
        assert len(self.digester.pending) == bool(self.ahead.unsettled) <= 1

    def teardown(self) -> None:
        super().teardown()
        assert not self.digester.pending
        type(self).num_late += self.digester.num_pages
        type(self).num_kept += 0 if self.rows is None else self.rows.num_kept
