"""The decode loop under budgets that change: what is there goes on, and what is new goes by the new budgets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.domain.errors import LinkBroken
from baton.domain.request import EngineRequest, StopParams
from baton.domain.worker import WorkerBudgets, WorkerRole
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Fail
from baton.engine.page_scrub import PageScrub
from baton.engine.reply import Reply
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.services.decode.commands import Claim, DecodeCommand
from baton.services.decode.effects import EmitTokens, OutwardEffect
from baton.services.decode.kv_import import Busy, Reserved
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.worker.budget_control import ChangeBudgets
from tests.tiny_workers import PAGE_BYTES, PAGE_SIZE, assert_idle, engine_request, expected_output, tiny_decode

STOP = StopParams(max_tokens=3)
FIRST = engine_request("first", [0, 1, 1, 0, 1, 0, 1], stop=STOP)
SECOND = engine_request("second", [1, 0, 0], stop=STOP)


@dataclass
class Worker:
    """A decode loop without its thread; the budget for prompts is four pages a step."""

    budgets: WorkerBudgets = field(default_factory=lambda: WorkerBudgets(4 * PAGE_SIZE, 4))
    effects: list[OutwardEffect] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.world = tiny_decode(digests=True, num_host_pages=0, token_budget=self.budgets.prefill_tokens)
        self.mailbox: Mailbox[DecodeCommand] = Mailbox(16)
        turn = EngineTurn(WorkerRole.DECODE, world.cache, self.mailbox, on_idle=lambda: None)
        scrub = PageScrub(PageChecks(world.cache), PAGE_BYTES)
        hooks = DecodeHooks(self.effects.extend, lambda pull: None, scrub)
        self.loop = DecodeLoop(turn, world.imports, world.scheduler, world.import_policy, world.runner, hooks)

    def reserve(self, request: EngineRequest, *, computes_prompt: bool = True) -> Reserved | Busy:
        answer, effects = self.world.import_policy.reserve(
            request.id, len(request.tokens), [], 0.0, 1e9, computes_prompt=computes_prompt
        )
        assert not effects
        return answer

    def claim(self, answer: Reserved | Busy, request: EngineRequest) -> None:
        assert isinstance(answer, Reserved)
        self.mailbox.put(Claim(answer.id, request, None, 10.0, 0.0))

    async def change(self, budgets: WorkerBudgets) -> None:
        reply: Reply[WorkerBudgets] = Reply()
        self.mailbox.put(ChangeBudgets(budgets, reply))
        assert self.loop.turn()
        assert await reply.wait(5.0) == self.loop.budgets() == budgets

    def run(self, request: EngineRequest) -> list[int]:
        while not any(isinstance(e, EmitTokens) and e.id == request.id and e.finish for e in self.effects):
            assert self.loop.turn()
        emitted = [e for e in self.effects if isinstance(e, EmitTokens) and e.id == request.id]
        return [token.token for effect in emitted for token in effect.tokens]


def test_the_loop_starts_with_the_budgets_of_its_parts():
    assert Worker().loop.budgets() == WorkerBudgets(4 * PAGE_SIZE, 4)


async def test_without_a_budget_the_prompts_that_are_here_are_computed():
    worker = Worker(WorkerBudgets(PAGE_SIZE, 4))
    reserved = worker.reserve(SECOND)
    worker.claim(worker.reserve(FIRST), FIRST)
    assert worker.loop.turn()
    assert worker.world.scheduler.num_local_tokens > 0
    await worker.change(WorkerBudgets(0, 4))
    assert worker.run(FIRST) == expected_output(FIRST)
    worker.claim(reserved, SECOND)  # it was promised before
    assert worker.run(SECOND) == expected_output(SECOND)
    assert_idle(worker.world.cache)


async def test_without_a_budget_no_prompt_is_promised_or_taken():
    worker = Worker()
    await worker.change(WorkerBudgets(0, 4))
    assert worker.reserve(FIRST) == Busy(0, no_prompts=True)
    handoff = worker.reserve(SECOND, computes_prompt=False)
    worker.claim(handoff, SECOND)  # an older router, which does not say what it reserves for
    assert worker.loop.turn()
    (failed,) = [effect for effect in worker.effects if isinstance(effect, Fail)]
    assert isinstance(failed.error, LinkBroken)
    assert_idle(worker.world.cache)


async def test_a_raised_budget_takes_prompts():
    worker = Worker(WorkerBudgets(0, 4))
    assert isinstance(worker.reserve(FIRST), Busy)
    await worker.change(WorkerBudgets(2 * PAGE_SIZE, 4))
    worker.claim(worker.reserve(engine_request("first", [0, 1, 1], attempt=2, stop=STOP)), FIRST)
    assert isinstance(worker.reserve(SECOND), Reserved)


async def test_rows_above_a_lowered_bound_finish():
    worker = Worker()
    for request in (FIRST, SECOND):
        worker.claim(worker.reserve(request), request)
    assert worker.loop.turn()
    await worker.change(WorkerBudgets(4 * PAGE_SIZE, 1))
    third = engine_request("third", [1, 1], stop=STOP)
    assert isinstance(worker.reserve(third), Busy)
    assert [worker.run(request) for request in (FIRST, SECOND)] == [expected_output(FIRST), expected_output(SECOND)]
    assert isinstance(worker.reserve(engine_request("third", [1, 1], attempt=2, stop=STOP)), Reserved)


async def test_reservations_are_bounded_apart_from_rows():
    worker = Worker()
    await worker.change(WorkerBudgets(4 * PAGE_SIZE, 4, 1))
    worker.claim(worker.reserve(FIRST), FIRST)
    assert worker.loop.turn()  # now it is a row
    assert isinstance(worker.reserve(SECOND), Reserved)
    assert isinstance(worker.reserve(engine_request("third", [1, 1], stop=STOP)), Busy)


def test_a_change_ends_the_wait_of_an_idle_engine():
    """Nothing polls: the command itself wakes the engine."""

    async def change() -> None:
        worker = Worker()
        turning = asyncio.create_task(asyncio.to_thread(worker.loop.turn))
        reply: Reply[WorkerBudgets] = Reply()
        worker.mailbox.put(ChangeBudgets(WorkerBudgets(0, 2), reply))
        assert await reply.wait(5.0) == WorkerBudgets(0, 2)
        assert await turning

    asyncio.run(change())
