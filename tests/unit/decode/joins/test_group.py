"""Rows of prompts that were sealed together decode in one step. A read that does not end costs the bound of a wait."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.domain.arithmetic import ceil_div
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import PageId, WorkerId
from baton.domain.request import EngineRequest, SampledToken, StopParams
from baton.domain.worker import WorkerRole
from baton.engine import step_metrics
from baton.engine.batch import Batch, StepOutput
from baton.engine.mailbox import Mailbox
from baton.engine.messages import Abort
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.services.decode import loop as loop_module
from baton.services.decode.commands import Claim, DecodeCommand, SealArrived
from baton.services.decode.kv_import import Reserved, SealInfo
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.rows.join_gate import JOINS_WITHIN_S, MAX_HOLD_S
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import (
    PAGE_BYTES,
    PAGE_SIZE,
    engine_request,
    expected_output,
    page_bytes,
    tiny_decode,
    true_digests,
)


@dataclass
class Worker:
    """A decode loop without its thread, on a clock that the test moves. Its last step took a second."""

    now: float = 100.0
    pulls: dict[tuple[int, ...], Pull] = field(default_factory=dict)
    steps: list[list[str]] = field(default_factory=list)
    last_submitted: Pull | None = None

    def __post_init__(self) -> None:
        world = self.world = tiny_decode(digests=True, num_host_pages=0)
        self.mailbox: Mailbox[DecodeCommand] = Mailbox(16)
        turn = EngineTurn(WorkerRole.DECODE, world.cache, self.mailbox, lambda: None)
        turn.steps.last_forward_s = 1.0
        hooks = DecodeHooks(lambda effects: None, self._submit, PageScrub(PageChecks(world.cache), PAGE_BYTES))
        self.loop = DecodeLoop(turn, world.imports, world.scheduler, world.import_policy, self, hooks)

    def _submit(self, pull: Pull) -> None:
        self.last_submitted = pull

    def run(self, batch: Batch) -> StepOutput:
        self.steps.append([str(row.id.request_id) for row in batch.rows])
        return self.world.runner.run(batch)

    def seal(self, name: str, tokens: list[int]) -> tuple[EngineRequest, Pull]:
        """A prompt is sealed; returns it with its read, which has begun."""
        request = engine_request(name, tokens, stop=StopParams(max_tokens=4))
        answer, _ = self.world.import_policy.reserve(request.id, len(tokens), [], self.now, 10.0)
        assert isinstance(answer, Reserved)
        pages = tuple(PageId(i) for i in range(ceil_div(len(tokens), PAGE_SIZE)))
        self.mailbox.put(Claim(answer.id, request, WorkerId("p"), 10.0, 0.0))
        self.mailbox.put(PublishedChunk(request.id, 0, pages, true_digests(request.tokens, 0, len(pages))))
        self.mailbox.put(SealArrived(request.id, SealInfo(SampledToken(expected_output(request)[0]), None, len(pages))))
        assert self.loop.turn()
        assert self.last_submitted is not None
        return request, self.last_submitted

    def end_read(self, request: EngineRequest, pull: Pull) -> None:
        for index, page in zip(pull.remote_pages, pull.local_pages, strict=True):
            data = page_bytes(request.tokens, index)
            self.world.memory.page(page)[: len(data)] = data
        self.mailbox.put(PullEvent(pull, PullOutcome.DONE, PAGE_BYTES, 0.1))
        assert self.loop.turn()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    for module in (loop_module, step_metrics):
        monkeypatch.setattr(module, "monotonic_s", lambda: worker.now)
    return worker


def test_rows_that_were_sealed_together_decode_in_one_step(worker: Worker):
    first, second = worker.seal("a", [0, 1, 1]), worker.seal("b", [1, 0, 1])
    worker.end_read(*first)
    assert worker.steps == [], "the second one's read is under way"
    worker.end_read(*second)
    assert worker.steps == [["a", "b"]]


def test_a_read_that_does_not_end_holds_a_step_for_its_bound_only(worker: Worker):
    first, _ = worker.seal("a", [0, 1, 1]), worker.seal("b", [1, 0, 1])
    worker.end_read(*first)
    worker.now += MAX_HOLD_S
    assert worker.loop.turn()
    assert worker.steps == [["a"]]


def test_a_source_that_hangs_holds_up_later_steps_no_more(worker: Worker):
    first, _ = worker.seal("a", [0, 1, 1]), worker.seal("b", [1, 0, 1])
    worker.now += JOINS_WITHIN_S + 0.001
    worker.end_read(*first)
    assert worker.steps == [["a"]]
    assert worker.loop.turn()
    assert worker.steps == [["a"], ["a"]]


def test_an_aborted_prompt_whose_reads_drain_holds_up_no_step(worker: Worker):
    first, (aborted, _) = worker.seal("a", [0, 1, 1]), worker.seal("b", [1, 0, 1])
    worker.mailbox.put(Abort(aborted.id, "client_gone"))
    worker.end_read(*first)
    assert worker.steps == [["a"]]
