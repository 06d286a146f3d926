"""Prefill's side with a step in flight and a device that runs late. Any rule may come between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.domain.ids import PageId
from baton.engine.batch import Batch, Row, StepOutput
from baton.engine.overlap.fake_async_runner import FakeAsyncRunner, FakeStep
from baton.kv.pages import Owner
from baton.services.prefill.overlap.scheduler import OverlapPrefillScheduler
from baton.services.prefill.policy import PrefillPolicy
from baton.services.prefill.scheduler import PrefillScheduler
from tests.property.machines.damaged_prefill_machine import DamagedPrefillMachine
from tests.property.machines.prefill_machine import MAX_CHUNKING, PrefillMachine
from tests.property.overlap.late_digester import GuardedMemory, LateDigester, LateDigests
from tests.property.overlap.overlap_machine import WatchedPool
from tests.tiny_workers import NUM_PAGES, assert_idle, check_invariants


class PrefillOverlapMachine(PrefillMachine):
    """Every rule of `PrefillMachine` may come while a step is in flight, and the device runs it at any moment."""

    prefill_scheduler: type[PrefillScheduler] = OverlapPrefillScheduler
    num_examples = 60
    num_ahead = 0
    """Steps that were started before the result of the one before was taken, over all examples."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.world.memory, GuardedMemory)
        assert isinstance(self.world.cache.pool, WatchedPool)
        self.pool = self.world.cache.pool
        assert isinstance(self.world.scheduler, OverlapPrefillScheduler)
        self.ahead = self.world.scheduler
        self.device = self.pool.device = self.world.memory.device = FakeAsyncRunner(self.world.runner)
        self.in_flight: list[tuple[Batch, FakeStep]] = []

    def _parts(self) -> tuple[GuardedMemory, WatchedPool]:
        return GuardedMemory(), WatchedPool(NUM_PAGES)

    def _stands_still(self, rows: Sequence[Row]) -> bool:
        return not rows and any(one.num_unscheduled for one in self.ahead._queue.chunking)

    @rule()
    def device_runs(self) -> None:
        self.device.advance()

    @precondition(lambda self: self.in_flight)
    @rule()
    def take_the_result_early(self) -> None:
        """A turn that starts nothing."""
        self._take()

    @rule(data=st.data(), disturbed=st.integers(0, 4))
    def step(self, data: st.DataObject, disturbed: int) -> None:
        batch = self._start()
        if batch is not None and disturbed == 0:
            self._abort(data.draw(st.sampled_from(batch.rows)).id)
        self._end_turn(started=batch is not None)

    @rule()
    def two_turns(self) -> None:
        for _ in range(2):
            batch = self._start()
            self._end_turn(started=batch is not None)

    @invariant()
    def page_counts_agree(self) -> None:
        check_invariants(self.world.cache)
        waiting = [case for case in self.cases.values() if not case.ended and not case.started]
        put_back = sum(self.cases[one.request.id].started for one in self.ahead._queue.waiting)
        assert self.ahead.num_waiting == len(waiting) + put_back
        exempt = self.order.policy is not PrefillPolicy.FCFS  # the oldest prompt
        half_done = [one for one in self.ahead._queue.chunking if one.num_unscheduled]
        assert len(half_done) <= MAX_CHUNKING + exempt
        assert len(self.world.exports) == sum(case.exported for case in self.cases.values())

    @invariant()
    def pages_wait_only_for_steps_in_flight(self) -> None:
        assert self.ahead.fence.num_in_flight == len(self.in_flight) <= 1
        assert self.in_flight or self.ahead.fence.num_pages == 0

    def teardown(self) -> None:
        """Ends everything by committing sealed exports: no prompt starves, no page leaks."""
        for _ in range(100 * len(self.cases) + 2):
            for id, case in self.cases.items():
                if case.sealed and case.exported:
                    case.exported = not self.world.exports.commit(id)
            batch = self._start()
            self._end_turn(started=batch is not None)
        assert all(case.ended and not case.exported for case in self.cases.values())
        assert_idle(self.world.cache)

    def _end_turn(self, *, started: bool) -> None:
        if len(self.in_flight) > started:
            self._take()

    def _start(self) -> Batch | None:
        batch = self._schedule()
        if batch is not None:
            type(self).num_ahead += len(self.in_flight)
            self.in_flight.append((batch, self.device.start(batch)))
            self.ahead.on_started(batch)
        return batch

    def _take(self) -> None:
        batch, step = self.in_flight.pop(0)
        self._on_effects(self.ahead.commit(batch, step.result(), self.now))


class DigestingMachine(PrefillOverlapMachine):
    """Pages of a step are hashed at any moment between its result and its commit."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.world.memory, GuardedMemory)
        self.memory = self.world.memory
        self.digester = self.pool.digester = self.memory.digester = LateDigester(self.memory)
        self.finished: list[tuple[Batch, StepOutput, LateDigests]] = []

    @rule()
    def digester_runs(self) -> None:
        self.digester.advance()

    @precondition(lambda self: self.finished)
    @rule()
    def take_the_digests_early(self) -> None:
        self._settle()

    @invariant()
    def pages_wait_only_for_steps_in_flight(self) -> None:
        num_steps = len(self.in_flight) + len(self.finished)
        assert self.ahead.fence.num_in_flight == num_steps <= 2
        assert num_steps or self.ahead.fence.num_pages == 0
        assert len(self.digester.pending) == len(self.finished) <= 1

    def teardown(self) -> None:
        super().teardown()
        assert not self.finished

    def _end_turn(self, *, started: bool) -> None:
        self._settle()
        super()._end_turn(started=started)

    def _take(self) -> None:
        self._settle()
        batch, step = self.in_flight.pop(0)
        output = step.result()
        self.finished.append((batch, output, self.digester.start(self.ahead.filled_pages(batch))))

    def _settle(self) -> None:
        if self.finished:
            batch, output, digests = self.finished.pop(0)
            self.ahead.keep_digests(batch, dict(zip(digests.pages, digests.wait(), strict=True)))
            self._on_effects(self.ahead.commit(batch, output, self.now))


class DamagedPrefillOverlapMachine(DigestingMachine, DamagedPrefillMachine):
    """Pages rot while steps are in flight, and prompts that were in them start again."""

    num_examples = 160

    def _check_row(self, row: Row, num_pinned: int) -> None:
        prompt = next(one for one in self.ahead._queue.chunking if one.request.id == row.id)
        if row.start == prompt.num_cached:  # its first step, perhaps again
            self.cases[row.id].num_computed = 0
        super()._check_row(row, num_pinned)

    def teardown(self) -> None:
        while self.in_flight or self.finished:
            self._end_turn(started=False)
        DamagedPrefillMachine.teardown(self)

    def _idle_pages(self) -> list[PageId]:
        owners = (Owner.CACHED, Owner.PINNED)
        busy = self.device.pages
        return [page for page in map(PageId, range(NUM_PAGES)) if self.pool.owner(page) in owners and page not in busy]
