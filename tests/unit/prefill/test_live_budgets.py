"""The prefill loop under budgets that change, and calls that end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.domain.errors import Overloaded
from baton.domain.request import EngineRequest
from baton.domain.worker import WorkerBudgets, WorkerRole
from baton.engine.handoff.export_events import ExportEnded, Seal
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Fail
from baton.engine.page_scrub import PageScrub
from baton.engine.reply import Reply
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.services.prefill.commands import AddPrompt, EndPromptCall, PrefillCommand, PrefillEvent
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.policy import PrefillLimits
from baton.worker.budget_control import ChangeBudgets
from tests.tiny_workers import PAGE_BYTES, PAGE_SIZE, engine_request, tiny_prefill

PROMPT = [0, 1, 1, 0, 1, 0, 1, 1]  # 4 pages


@dataclass
class Worker:
    """A prefill loop without its thread."""

    events: list[PrefillEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.world = tiny_prefill(9.0, 4 * PAGE_SIZE)
        self.mailbox: Mailbox[PrefillCommand] = Mailbox(16)
        turn = EngineTurn(WorkerRole.PREFILL, world.cache, self.mailbox, on_idle=lambda: None)
        scrub = PageScrub(PageChecks(world.cache), PAGE_BYTES)
        self.loop = PrefillLoop(turn, world.scheduler, world.exports, world.runner, scrub, self.events.extend)

    def add(self, request: EngineRequest) -> None:
        self.mailbox.put(AddPrompt(request, 0, 60.0, 0.0))

    async def change(self, num_tokens: int) -> None:
        reply: Reply[WorkerBudgets] = Reply()
        self.mailbox.put(ChangeBudgets(WorkerBudgets(num_tokens), reply))
        assert self.loop.turn()
        assert await reply.wait(5.0) == self.loop.budgets() == WorkerBudgets(num_tokens)

    def sealed(self) -> list[str]:
        return [event.id.request_id for event in self.events if isinstance(event, Seal)]


async def test_a_step_keeps_to_the_budget_in_force():
    worker = Worker()
    await worker.change(PAGE_SIZE)
    worker.add(engine_request("a", PROMPT))
    num_turns = 0
    while not worker.sealed():
        assert worker.loop.turn()
        num_turns += 1
    assert num_turns == 4, "a page a step"
    assert worker.world.exports.commit(engine_request("a", PROMPT).id), "its pins leave room for the next prompt"
    await worker.change(4 * PAGE_SIZE)
    worker.add(engine_request("b", PROMPT, salt="other"))
    assert worker.loop.turn()
    assert worker.sealed() == ["a", "b"]


async def test_without_a_budget_new_prompts_are_refused_and_old_ones_sealed():
    worker = Worker()
    await worker.change(PAGE_SIZE)
    worker.add(engine_request("here", PROMPT[:4]))
    assert worker.loop.turn()
    worker.add(engine_request("before", [1, 1]))  # it was put before the change
    await worker.change(0)
    worker.add(engine_request("after", [0, 0]))
    while len(worker.sealed()) < 2:
        assert worker.loop.turn()
    (failed,) = [event for event in worker.events if isinstance(event, Fail)]
    assert failed.id.request_id == "after"
    assert isinstance(failed.error, Overloaded), "which costs the request no attempt"
    assert sorted(worker.sealed()) == ["before", "here"]
    assert worker.loop.num_requests == 2, "the exports of the sealed ones; none was opened for the refused one"
    await worker.change(2 * PAGE_SIZE)
    worker.add(engine_request("again", [0, 1]))
    assert worker.loop.turn()
    assert "again" in worker.sealed()


def test_the_default_threshold_of_a_long_prompt_follows_the_budget():
    limits = PrefillLimits(16, 512, 4, 100, long_prompt_tokens=4000, leaves_a_quarter=True)
    assert limits.contested_tokens == 384
    assert limits.with_token_budget(64).contested_tokens == 48
    assert limits.with_token_budget(64).with_token_budget(8192).contested_tokens == 4000
    assert limits.with_token_budget(16).contested_tokens == 16, "a page at least"
    assert PrefillLimits(16, 512, 4, 100, long_prompt_tokens=500).contested_tokens == 500
    assert PrefillLimits(16, 512, 4, 100).contested_tokens == 512


@pytest.mark.parametrize("repeats", [False, True])
def test_the_end_of_a_call_ends_its_attempt_unless_it_repeated_one(repeats: bool):
    """A second call that is cancelled before it was refused: decode reads the pages of the first one."""
    worker, request = Worker(), engine_request("a", PROMPT)
    worker.add(request)
    while not worker.sealed():
        assert worker.loop.turn()
    call = AddPrompt(engine_request("a" if repeats else "b", PROMPT), 0, 60.0, 0.0)
    worker.mailbox.put(call)
    worker.mailbox.put(EndPromptCall(call, "the router closed the stream"))
    assert worker.loop.turn()
    ends = [event.id.request_id for event in worker.events if isinstance(event, ExportEnded)]
    assert ends == ([] if repeats else ["b"])
    assert worker.world.exports.commit(request.id)
