"""The overlapped prefill loop against the plain one: any arrivals and aborts, the same tokens, pages and digests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId
from baton.domain.request import EngineRequest, FinishReason, StopParams
from baton.domain.worker import WorkerRole
from baton.engine.batch import Batch, StepInFlight
from baton.engine.handoff.export_events import Seal
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Abort
from baton.engine.overlap.fake_async_runner import FakeAsyncRunner
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.services.prefill.commands import AddPrompt, PrefillCommand, PrefillEvent, TierEnded
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.overlap.scheduler import OverlapPrefillScheduler
from baton.services.prefill.overlap.steps import StepQueue
from baton.services.prefill.scheduler import PrefillScheduler
from tests.property.overlap.late_digester import GuardedMemory, LateDigester
from tests.property.overlap.overlap_machine import WatchedPool
from tests.tiny_workers import (
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_SIZE,
    REPEATABLE_SETTINGS,
    assert_idle,
    engine_request,
    next_token,
    num_pages,
    tiny_prefill,
    true_digests,
)

NUM_TURNS = 80


@dataclass(frozen=True)
class Arrival:
    """A request, the turn it comes in, and the turns after which it is aborted; None: never."""

    request: EngineRequest
    turn: int
    abort_after: int | None
    num_decode_pages: int


@dataclass
class Heard:
    """What one request's handoff announced: digests by page of the prompt, and its end."""

    digests: dict[int, int] = field(default_factory=dict)
    first: int | None = None
    finish: FinishReason | None = None
    sealed: bool = False


class LoopWorld:
    """One prefill loop; with an `OverlapPrefillScheduler` its device runs at drawn moments."""

    def __init__(self, scheduler: type[PrefillScheduler], seed: int, *, digests_beside: bool = False) -> None:
        memory, pool = GuardedMemory(), WatchedPool(NUM_PAGES)
        self.memory = memory
        self.world = tiny_prefill(1e9, prefill_scheduler=scheduler, memory=memory, pool=pool)
        self.device = FakeAsyncRunner(self.world.runner)
        self.mailbox: Mailbox[PrefillCommand] = Mailbox(64)
        self.heard: dict[AttemptId, Heard] = {}
        self._rng = random.Random(seed)
        turn = EngineTurn(WorkerRole.PREFILL, self.world.cache, self.mailbox, lambda: None)
        scrub = PageScrub(PageChecks(self.world.cache), PAGE_BYTES)
        world = self.world
        self.loop = PrefillLoop(turn, world.scheduler, world.exports, world.runner, scrub, self._emit)
        if isinstance(world.scheduler, OverlapPrefillScheduler):
            pool.device = memory.device = self.device
            if digests_beside:
                pool.digester = memory.digester = LateDigester(memory)
            self.loop.ahead = StepQueue(world.scheduler, self._start, turn.steps, memory.digester)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Plays the history; each export is committed one turn after its seal."""
        committed: set[AttemptId] = set()
        for turn in range(NUM_TURNS):
            for one in arrivals:
                id = one.request.id
                if one.turn == turn:
                    self.heard[id] = Heard()
                    self.mailbox.put(AddPrompt(one.request, one.num_decode_pages * PAGE_SIZE, 1e9, 0.0))
                if one.abort_after is not None and one.turn + one.abort_after == turn:
                    self.mailbox.put(Abort(id, "the client left"))
                if id in self.heard and self.heard[id].sealed and id not in committed:
                    committed.add(id)
                    assert self.world.exports.commit(id) or one.abort_after is not None
            self.mailbox.put(TierEnded())  # no turn waits
            assert self.loop.turn()
        assert self.loop.num_requests == 0
        self.mailbox.close()
        assert not self.loop.turn()

    def _start(self, batch: Batch) -> StepInFlight:
        self._maybe_run()
        step = self.device.start(batch)
        self._maybe_run()
        return step

    def _emit(self, events: list[PrefillEvent]) -> None:
        for event in events:
            if isinstance(event, PublishedChunk):
                assert event.digests is not None
                assert not self.heard[event.id].sealed
                self.heard[event.id].digests |= dict(enumerate(event.digests, event.first_page))
            elif isinstance(event, Seal):
                heard = self.heard[event.id]
                assert not heard.sealed
                heard.first, heard.finish, heard.sealed = event.first_token.token, event.finish, True
        self._maybe_run()

    def _maybe_run(self) -> None:
        if self._rng.random() < 0.4:
            self.device.advance()
        if self.memory.digester is not None and self._rng.random() < 0.4:
            self.memory.digester.advance()


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=2 * PAGE_SIZE),  # its end
        st.integers(0, 3),  # pages of the prefix that all have in common
        st.integers(1, 2),  # max_tokens
        st.integers(0, 3),  # seed
        st.integers(0, 9),  # turn of its arrival
        st.sampled_from([None, None, None, 0, 1, 2, 3]),  # turns after which it is aborted
        st.integers(0, 1),  # pages that decode has
    ),
    min_size=1,
    max_size=6,
)


def arrivals_of(drawn: Sequence[tuple[list[int], int, int, int, int, int | None, int]]) -> list[Arrival]:
    arrivals = []
    for number, (end, num_shared, max_tokens, seed, turn, abort_after, num_decode_pages) in enumerate(drawn):
        prompt = [0, 1] * num_shared + end
        request = engine_request(f"r{number}", prompt, seed=seed, stop=StopParams(max_tokens))
        arrivals.append(Arrival(request, turn, abort_after, min(num_decode_pages, (len(prompt) - 1) // PAGE_SIZE)))
    return arrivals


def check(arrival: Arrival, heard: Heard) -> None:
    """What was announced is what the model alone would give."""
    request, num_tokens = arrival.request, len(arrival.request.tokens)
    digests = true_digests(request.tokens, 0, num_tokens // PAGE_SIZE)
    full = {page: digest for page, digest in heard.digests.items() if page < num_tokens // PAGE_SIZE}
    assert full == {page: digests[page] for page in full}
    if heard.sealed:
        assert (heard.first, heard.finish) == next_token(request, list(request.tokens))
        assert sorted(heard.digests) == list(range(arrival.num_decode_pages, num_pages(num_tokens)))


@settings(REPEATABLE_SETTINGS, max_examples=100)
@given(drawn=REQUESTS, seed=st.integers(0, 999))
def test_tokens_pages_and_digests_equal_the_plain_loops(drawn, seed: int):
    arrivals = arrivals_of(drawn)
    plain, ahead = LoopWorld(PrefillScheduler, seed), LoopWorld(OverlapPrefillScheduler, seed)
    beside = LoopWorld(OverlapPrefillScheduler, seed, digests_beside=True)
    for world in (plain, ahead, beside):
        world.run(arrivals)
    for one in arrivals:
        for world in (plain, ahead, beside):
            heard = world.heard[one.request.id]
            check(one, heard)
            assert heard.sealed or one.abort_after is not None
    for world in (plain, ahead, beside):
        assert_idle(world.world.cache)
    total = sum(num_pages(len(one.request.tokens)) for one in arrivals)
    if total <= NUM_PAGES and all(one.abort_after is None for one in arrivals):  # nothing was evicted or aborted
        for world in (ahead, beside):
            assert world.world.cache.pool.counts() == plain.world.cache.pool.counts()
            assert set(world.world.cache._nodes) == set(plain.world.cache._nodes)


@pytest.mark.parametrize("digests_beside", [False, True])
def test_pages_can_be_evicted_as_soon_as_decode_has_them(digests_beside: bool):
    """A step behind the prompt's last one still runs when its export is committed, and the next prompt needs pages."""
    first, behind = engine_request("a", [0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1]), engine_request("b", [1, 0, 1])
    for turn in range(4, 8):
        world = LoopWorld(OverlapPrefillScheduler, 0, digests_beside=digests_beside)
        arrivals = [Arrival(first, 0, None, 0), Arrival(behind, 3, None, 0)]
        arrivals.append(Arrival(engine_request("c", [1, 1, 0, 0, 1, 0, 1]), turn, None, 0))
        world.run(arrivals)
        assert all(world.heard[one.request.id].sealed for one in arrivals)
        assert_idle(world.world.cache)


def test_chunks_of_one_prompt_run_ahead():
    arrival = Arrival(engine_request("r", [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0]), 0, None, 0)
    ahead = LoopWorld(OverlapPrefillScheduler, 0)
    ahead.run([arrival])
    check(arrival, ahead.heard[arrival.request.id])
    assert ahead.heard[arrival.request.id].sealed
    assert ahead.device.max_in_flight == 2


def test_a_step_runs_while_events_of_the_one_before_go_out():
    ahead, seen = LoopWorld(OverlapPrefillScheduler, 0), list[int]()
    emit = ahead.loop._emit

    def record(events: list[PrefillEvent]) -> None:
        if any(isinstance(event, PublishedChunk) for event in events):
            seen.append(0 if ahead.loop.ahead is None else len(ahead.loop.ahead))
        emit(events)

    ahead.loop._emit = record
    ahead.run([Arrival(engine_request("r", [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0]), 0, None, 0)])
    assert seen == [1, 1, 0]


def test_the_engine_thread_hashes_no_page_of_a_step():
    beside = LoopWorld(OverlapPrefillScheduler, 0, digests_beside=True)
    prompt = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0]  # with a partial last page
    beside.run([Arrival(engine_request("r", prompt), 0, None, 0)])
    heard = beside.heard[engine_request("r", prompt).id]
    check(Arrival(engine_request("r", prompt), 0, None, 0), heard)
    assert heard.sealed
    assert beside.memory.digester is not None
    assert beside.memory.digester.num_pages == num_pages(len(prompt))
    assert beside.memory.read_by_engine == []


def test_a_further_step_starts_before_the_digests_are_waited_for():
    beside, seen = LoopWorld(OverlapPrefillScheduler, 0, digests_beside=True), list[int]()
    digester, steps = beside.memory.digester, beside.loop.ahead
    assert digester is not None
    assert steps is not None
    digester.runs_early, digester.on_compute = False, lambda: seen.append(steps.num_running)
    prompt = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1]  # 4 steps
    beside.run([Arrival(engine_request("r", prompt), 0, None, 0)])
    assert seen == [2, 2, 1, 0]


@pytest.mark.parametrize("digests_beside", [False, True])
def test_closing_commits_the_step_in_flight(digests_beside):
    request = engine_request("r", [0, 1, 1])
    ahead = LoopWorld(OverlapPrefillScheduler, 0, digests_beside=digests_beside)
    ahead.heard[request.id] = Heard()
    ahead.mailbox.put(AddPrompt(request, 0, 1e9, 0.0))
    assert ahead.loop.turn()
    assert ahead.loop.ahead is not None
    assert len(ahead.loop.ahead) == 1
    ahead.mailbox.close()
    assert not ahead.loop.turn()
    assert ahead.heard[request.id].sealed
