"""The prompts of a burst go into one step of an idle engine, and nothing waits for prompts that do not come."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.domain.timing.step_time import MIN_STEPS
from baton.domain.worker import WorkerRole
from baton.engine import step_metrics
from baton.engine.handoff.export_events import Seal
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Abort
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.services.prefill import loop as loop_module
from baton.services.prefill.commands import AddPrompt, PrefillCommand, PrefillEvent
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.policy import GAP_S, MAX_GAPS, BurstGate
from tests.tiny_workers import PAGE_BYTES, PAGE_SIZE, engine_request, tiny_prefill


@dataclass
class StepTimes:
    """A second a token."""

    num_steps: int = MIN_STEPS
    token_s: float = 1.0
    error: float = 0.0

    def seconds_of(self, num_tokens: int, start: int, chunk_tokens: int) -> float:
        return self.token_s * num_tokens


@dataclass
class Worker:
    """A prefill loop without its thread, with a budget of eight tokens, on a clock that the test moves."""

    times: StepTimes
    now: float = 100.0
    events: list[PrefillEvent] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        world = self.world = tiny_prefill(9.0, 4 * PAGE_SIZE, max_pinned_pages=8)
        self.mailbox: Mailbox[PrefillCommand] = Mailbox(16)
        turn = EngineTurn(WorkerRole.PREFILL, world.cache, self.mailbox, on_idle=lambda: None)
        scrub = PageScrub(PageChecks(world.cache), PAGE_BYTES)
        self.loop = PrefillLoop(turn, world.scheduler, world.exports, self, scrub, self.events.extend)
        self.loop.burst = BurstGate(self.times)

    def run(self, batch):
        self.num_steps += 1
        return self.world.runner.run(batch)

    def add(self, name: str, num_coming: int) -> None:
        """A prompt of two tokens."""
        number = ord(name)
        self.mailbox.put(
            AddPrompt(engine_request(name, [number % 2, number // 2 % 2], salt=name), 0, 60.0, 0.0, None, num_coming)
        )

    def turn(self) -> list[str]:
        """Runs a turn; returns the prompts that have sealed so far."""
        assert self.loop.turn()
        return [event.id.request_id for event in self.events if isinstance(event, Seal)]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker(StepTimes())
    for module in (loop_module, step_metrics):
        monkeypatch.setattr(module, "monotonic_s", lambda: worker.now)
    return worker


def test_a_burst_is_one_step(worker: Worker):
    for name, num_coming in (("a", 2), ("b", 1)):
        worker.add(name, num_coming)
        assert worker.turn() == []
    worker.add("c", 0)
    assert worker.turn() == ["a", "b", "c"]
    assert worker.num_steps == 1


def test_prompts_that_overtake_each_other_end_the_wait_early(worker: Worker):
    """As if the router had told of fewer: a later count is the newer one."""
    worker.add("b", 2)
    worker.add("a", 3)
    assert worker.turn() == []
    worker.add("c", 0)
    assert sorted(worker.turn()) == ["a", "b", "c"]


def test_a_prompt_that_does_not_come_costs_a_gap(worker: Worker):
    worker.add("a", 7)
    assert worker.turn() == []
    worker.now += GAP_S
    assert worker.turn() == ["a"]


def test_the_whole_wait_is_bounded():
    gate, began_at = BurstGate(StepTimes()), 100.0
    now, is_idle, num_coming = began_at, True, 40
    while is_idle or gate.holds(now):
        gate.on_added(num_coming, 2, 1000, now, is_idle=is_idle)
        is_idle, num_coming, now = False, num_coming - 1, now + 0.9 * GAP_S
    assert MAX_GAPS * GAP_S <= now - began_at < (MAX_GAPS + 1) * GAP_S


@pytest.mark.parametrize("num_coming", [0, 1])
def test_a_lone_prompt_and_a_pair_wait_for_nothing(worker: Worker, num_coming: int):
    worker.add("a", num_coming)
    assert worker.turn() == ["a"]


def test_a_full_step_waits_for_nothing(worker: Worker):
    worker.mailbox.put(AddPrompt(engine_request("a", [0, 1] * 4), 0, 60.0, 0.0, None, 7))
    assert worker.turn() == ["a"]


def test_a_busy_engine_waits_for_nothing(worker: Worker):
    worker.mailbox.put(AddPrompt(engine_request("long", [0, 1] * 6), 0, 60.0, 0.0))
    assert worker.turn() == []
    assert worker.num_steps == 1
    worker.add("a", 7)
    assert "a" in worker.turn()


@pytest.mark.parametrize("times", [StepTimes(num_steps=MIN_STEPS - 1), StepTimes(token_s=0.0), StepTimes(error=1.0)])
def test_without_a_prediction_or_for_short_steps_nothing_waits(worker: Worker, times: StepTimes):
    worker.loop.burst = BurstGate(times)
    worker.add("a", 7)
    assert worker.turn() == ["a"]


def test_an_aborted_prompt_leaves_no_wait(worker: Worker):
    worker.add("a", 7)
    assert worker.turn() == []
    worker.mailbox.put(Abort(engine_request("a", [0]).id, "gone"))
    worker.add("b", 0)
    assert worker.turn() == ["b"]


@pytest.mark.parametrize("error", [0.0, 0.4])
def test_a_wait_is_a_share_of_the_common_step(error: float):
    gate = BurstGate(StepTimes(token_s=0.01, error=error))
    gate.on_added(3, 2, 8, 100.0, is_idle=True)
    assert gate.next_wakeup() == pytest.approx(100.0 + 0.02 * (1 - error) * 0.01 * 8)
