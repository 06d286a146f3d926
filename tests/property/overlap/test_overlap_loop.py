"""The overlapped decode loop against the plain one: any history of joins, ends, aborts and preemptions, same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, PageKey
from baton.domain.request import EngineRequest, FinishReason, StopParams
from baton.domain.worker import WorkerRole
from baton.engine.batch import Batch, StepInFlight
from baton.engine.handoff.import_commands import LeasesRenewed
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Abort
from baton.engine.overlap.fake_async_runner import FakeAsyncRunner
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.kv.prefix_cache import PrefixCache
from baton.services.decode.commands import Claim, DecodeCommand
from baton.services.decode.effects import EmitTokens, OutwardEffect
from baton.services.decode.kv_import import Reserved
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.rows.unsettled_pages import UnsettledRows
from baton.services.decode.scheduler import DecodeScheduler
from baton.telemetry.metrics import OVERLAP_DROPPED_TOKENS_TOTAL
from tests.property.overlap.late_digester import GuardedMemory, LateDigester
from tests.property.overlap.overlap_machine import WatchedPool
from tests.tiny_workers import (
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_SIZE,
    REPEATABLE_SETTINGS,
    assert_idle,
    engine_request,
    expected_output,
    next_token,
    tiny_decode,
)
from tests.unit.decode.test_scheduler import board

NUM_TURNS = 120


@dataclass(frozen=True)
class Arrival:
    """A request, the turn it comes in, and the number of tokens after which its client aborts it; None: never."""

    request: EngineRequest
    turn: int
    abort_after: int | None
    is_local: bool


@dataclass
class Heard:
    """Tokens after the first one, which prefill gives, and the end of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class LoopWorld:
    """One decode loop whose device runs at drawn moments."""

    def __init__(self, scheduler: type[DecodeScheduler], seed: int, *, digests_beside: bool = False) -> None:
        pool, memory = WatchedPool(NUM_PAGES), GuardedMemory()
        self.memory = memory
        self.world = tiny_decode(True, NUM_PAGES, token_budget=4, decode_scheduler=scheduler, pool=pool, memory=memory)
        self.device = pool.device = memory.device = FakeAsyncRunner(self.world.runner)
        if digests_beside:
            assert isinstance(self.world.scheduler, OverlapScheduler)
            pool.digester = memory.digester = LateDigester(memory)
            self.world.scheduler.unsettled = UnsettledRows(memory.digester)
        self.mailbox: Mailbox[DecodeCommand] = Mailbox(64)
        self.heard: dict[AttemptId, Heard] = {}
        self._rng = random.Random(seed)
        turn = EngineTurn(WorkerRole.DECODE, self.world.cache, self.mailbox, lambda: None)
        scrub = PageScrub(PageChecks(self.world.cache), PAGE_BYTES)
        hooks = DecodeHooks(self._emit, lambda pull: None, scrub, self._start)
        world = self.world
        self.loop = DecodeLoop(turn, world.imports, world.scheduler, world.import_policy, world.runner, hooks)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Plays the history; a request that finds no room asks again in the next turn."""
        waiting, aborting = list(arrivals), {one.request.id: one.abort_after for one in arrivals}
        for turn in range(NUM_TURNS):
            waiting = [one for one in waiting if one.turn > turn or not self._join(one)]
            for id, heard in self.heard.items():
                if (after := aborting.get(id)) is not None and len(heard.tokens) >= after and heard.finish is None:
                    self.mailbox.put(Abort(id, "the client left"))
                    del aborting[id]
            self.mailbox.put(LeasesRenewed((), 0.0))  # no turn waits
            assert self.loop.turn()
        assert not waiting
        assert self.loop.num_requests == 0

    def _join(self, arrival: Arrival) -> bool:
        request, policy = arrival.request, self.world.import_policy
        answer, _ = policy.reserve(request.id, len(request.tokens), [], 0.0, 1e9, computes_prompt=arrival.is_local)
        if not isinstance(answer, Reserved):
            return False
        self.heard[request.id] = Heard()
        if arrival.is_local:
            self.mailbox.put(Claim(answer.id, request, None, 1e9, 0.0))
        elif next_token(request, list(request.tokens))[1] is None:
            board(self.world, request)
        else:
            policy.abort(request.id)  # prefill's token ends it
        return True

    def _start(self, batch: Batch) -> StepInFlight:
        self._maybe_run()
        step = self.device.start(batch)
        self._maybe_run()
        return step

    def _emit(self, effects: list[OutwardEffect]) -> None:
        for effect in effects:
            if isinstance(effect, EmitTokens):
                heard = self.heard[effect.id]
                assert heard.finish is None, "a token behind the end"
                heard.tokens += [token.token for token in effect.tokens]
                heard.finish = effect.finish
        self._maybe_run()

    def _maybe_run(self) -> None:
        if self._rng.random() < 0.4:
            self.device.advance()
        if self.memory.digester is not None and self._rng.random() < 0.4:
            self.memory.digester.advance()


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=5),  # prompt
        st.integers(1, 9),  # max_tokens
        st.booleans(),  # stops at token 1
        st.integers(0, 3),  # seed, and min_tokens
        st.integers(0, 9),  # turn of its arrival
        st.sampled_from([None, None, None, 1, 2, 4]),  # tokens after which it is aborted
        st.sampled_from([False, False, False, True]),  # computed here
    ),
    min_size=1,
    max_size=6,
)


def arrivals_of(drawn: Sequence[tuple[list[int], int, bool, int, int, int | None, bool]]) -> list[Arrival]:
    return [
        Arrival(
            engine_request(
                f"r{number}", prompt, seed=seed,
                stop=StopParams(max_tokens, max(0, seed - 1), frozenset({1}) if stops else frozenset()),
            ),
            turn, abort_after, is_local,
        )
        for number, (prompt, max_tokens, stops, seed, turn, abort_after, is_local) in enumerate(drawn)
        if len(prompt) + max_tokens <= 12
    ]  # fmt: skip


def digests_by_key(cache: PrefixCache) -> dict[PageKey, int]:
    """Of all cached pages."""
    return {key: cache.pool.digests.digest(node.page) for key, node in cache._nodes.items()}


@settings(REPEATABLE_SETTINGS, max_examples=80)
@given(drawn=REQUESTS, seed=st.integers(0, 999))
def test_tokens_and_ends_equal_the_plain_loops(drawn, seed: int):
    arrivals = arrivals_of(drawn)
    plain, ahead = LoopWorld(DecodeScheduler, seed), LoopWorld(OverlapScheduler, seed)
    beside = LoopWorld(OverlapScheduler, seed, digests_beside=True)
    for world in (plain, ahead, beside):
        world.run(arrivals)
    assert plain.device.max_in_flight <= 1
    for one in arrivals:
        first = 0 if one.is_local else 1
        expected = expected_output(one.request)[first:]
        for world in (plain, ahead, beside):
            heard = world.heard[one.request.id]
            assert heard.tokens == expected[: len(heard.tokens)]
            ends = len(heard.tokens) == len(expected) and (bool(expected) or one.is_local)
            assert (heard.finish is not None) == ends or one.abort_after is not None
        if one.abort_after is None:
            assert ahead.heard[one.request.id] == plain.heard[one.request.id] == beside.heard[one.request.id]
    for world in (plain, ahead, beside):
        assert_idle(world.world.cache)
    num_pages = sum(ceil_div(len(one.request.tokens) + one.request.stop.max_tokens, PAGE_SIZE) for one in arrivals)
    if num_pages <= NUM_PAGES and all(one.abort_after is None for one in arrivals):  # nothing was evicted or aborted
        for world in (ahead, beside):
            assert world.world.cache.pool.counts() == plain.world.cache.pool.counts()
            assert digests_by_key(world.world.cache) == digests_by_key(plain.world.cache)


def test_rows_run_ahead_and_an_extra_token_is_dropped():
    stop = StopParams(6, stop_token_ids=frozenset({1}))
    arrivals = [
        Arrival(engine_request(f"r{seed}", [0, 1, 1], stop=stop, seed=seed), 0, None, is_local=False) for seed in (0, 1)
    ]
    ahead, before = LoopWorld(OverlapScheduler, 0), OVERLAP_DROPPED_TOKENS_TOTAL._value.get()
    ahead.run(arrivals)
    scheduler = ahead.world.scheduler
    assert isinstance(scheduler, OverlapScheduler)
    assert ahead.device.max_in_flight == 2
    assert ahead.device.num_future_tokens > 0
    ends = [ahead.heard[one.request.id].finish for one in arrivals if ahead.heard[one.request.id].tokens]
    assert scheduler.num_dropped_tokens == ends.count(FinishReason.STOP)
    assert OVERLAP_DROPPED_TOKENS_TOTAL._value.get() - before == scheduler.num_dropped_tokens
    assert FinishReason.STOP in ends


LONG_ROW = engine_request("r", [0, 1, 1], stop=StopParams(8))
"""Fills a page in every second step."""


def test_the_engine_thread_hashes_no_page_that_a_row_fills():
    beside = LoopWorld(OverlapScheduler, 0, digests_beside=True)
    beside.run([Arrival(LONG_ROW, 0, None, is_local=False)])
    assert beside.heard[LONG_ROW.id].tokens == expected_output(LONG_ROW)[1:]
    assert beside.memory.digester is not None
    assert beside.memory.digester.num_pages == 4
    assert len(beside.world.cache) == 5  # the first one was imported
    assert beside.memory.read_by_engine == []


def test_the_engine_thread_hashes_no_page_of_a_local_prompt():
    beside = LoopWorld(OverlapScheduler, 0, digests_beside=True)
    prompt = engine_request("p", [0, 1, 1, 0, 1, 0, 0, 0, 1], stop=StopParams(2))
    beside.run([Arrival(prompt, 0, None, is_local=True)])
    assert beside.heard[prompt.id].tokens == expected_output(prompt)
    assert beside.memory.read_by_engine == []
    assert len(beside.world.cache) == 5


def test_a_step_is_started_before_the_digests_are_waited_for():
    beside, seen = LoopWorld(OverlapScheduler, 0, digests_beside=True), list[int]()
    digester = beside.memory.digester
    assert digester is not None
    digester.runs_early, digester.on_compute = False, lambda: seen.append(len(beside.device._in_flight))
    beside.run([Arrival(LONG_ROW, 0, None, is_local=False)])
    assert seen == [1, 1, 1, 0], "nothing is left to start behind the last page only"


def test_closing_takes_the_step_in_flight():
    request = engine_request("r", [0, 1, 1], stop=StopParams(6))
    ahead = LoopWorld(OverlapScheduler, 0)
    board(ahead.world, request)
    ahead.heard[request.id] = Heard()
    for _ in range(3):
        ahead.mailbox.put(LeasesRenewed((), 0.0))
        assert ahead.loop.turn()
    ahead.mailbox.close()
    before = len(ahead.heard[request.id].tokens)
    assert not ahead.loop.turn()
    assert len(ahead.heard[request.id].tokens) == before + 1
    assert ahead.heard[request.id].tokens == expected_output(request)[1 : before + 2]
