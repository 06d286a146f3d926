"""Order of a turn: effects go out after their step or while the next one runs, and none is lost.

Reads of an import begin with the step of the turn in which its pages are announced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.domain.arithmetic import ceil_div
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import PageId, WorkerId
from baton.domain.request import SampledToken, StopParams
from baton.domain.worker import WorkerRole
from baton.engine.batch import Batch, StepOutput
from baton.engine.mailbox import Mailbox
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.page_checks import PageChecks
from baton.services.decode.commands import Claim, DecodeCommand, SealArrived
from baton.services.decode.effects import EmitTokens, OutwardEffect
from baton.services.decode.kv_import import Reserved, SealInfo
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import (
    PAGE_BYTES,
    PAGE_SIZE,
    TinyDecode,
    engine_request,
    expected_output,
    page_bytes,
    tiny_decode,
    true_digests,
)


@dataclass
class Step:
    """A step in flight whose result is computed on demand, as on a device."""

    world: Bench
    batch: Batch

    def result(self) -> StepOutput:
        self.world.said.append("result")
        return self.world.decode.runner.run(self.batch)


@dataclass
class Bench:
    """Records the order of `start`, `result` and `emit`, and the emitted tokens."""

    decode: TinyDecode
    said: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the requests of the last emission of tokens
    finished: bool = False
    idle: int = 0
    broken: bool = False

    def start(self, batch: Batch) -> Step:
        self.said.append("start")
        if self.broken:
            raise RuntimeError("the device is gone")
        return Step(self, batch)

    def emit(self, effects: list[OutwardEffect]) -> None:
        self.names = [str(one.id.request_id) for one in effects if isinstance(one, EmitTokens)] or self.names
        for effect in effects:
            if isinstance(effect, EmitTokens):
                self.said.append("emit")
                self.tokens += [token.token for token in effect.tokens]
                self.finished = self.finished or effect.finish is not None

    def rest(self) -> None:
        self.idle += 1


def make(overlaps: bool, max_tokens: int = 4) -> tuple[Bench, DecodeLoop, Mailbox[DecodeCommand], list[int]]:
    """A loop with one claimed local prompt."""
    world = tiny_decode(digests=True, num_host_pages=0, token_budget=4)
    bench = Bench(world)
    mailbox: Mailbox[DecodeCommand] = Mailbox(16)
    turn = EngineTurn(WorkerRole.DECODE, world.cache, mailbox, bench.rest)
    hooks = DecodeHooks(
        bench.emit, lambda pull: None, PageScrub(PageChecks(world.cache), PAGE_BYTES), bench.start if overlaps else None
    )
    loop = DecodeLoop(turn, world.imports, world.scheduler, world.import_policy, world.runner, hooks)
    request = engine_request("r", [0, 1, 1], stop=StopParams(max_tokens=max_tokens))
    answer, _ = world.import_policy.reserve(request.id, len(request.tokens), [], 0.0, 10.0)
    assert isinstance(answer, Reserved)
    mailbox.put(Claim(answer.id, request, None, 10.0, 0.0))
    return bench, loop, mailbox, expected_output(request)


def run_until_finished(bench: Bench, loop: DecodeLoop) -> None:
    while not bench.finished:
        assert loop.turn()


def test_without_overlap_effects_go_out_after_their_step():
    bench, loop, _, wanted = make(overlaps=False)
    run_until_finished(bench, loop)
    assert bench.tokens == wanted
    assert bench.said == ["emit"] * len(wanted)


def test_with_overlap_tokens_go_out_while_the_next_step_runs():
    bench, loop, _, wanted = make(overlaps=True)
    run_until_finished(bench, loop)
    assert bench.tokens == wanted
    # The prompt's last chunk gives the first token. Each step then emits the previous one's; the last waits for none.
    assert "".join(bench.said).replace("start", "S").replace("emit", "E").replace("result", "R").endswith("SERSERSERE")
    assert bench.said.count("start") == bench.said.count("result")


def test_an_idle_loop_has_emitted_everything():
    bench, loop, _, wanted = make(overlaps=True)
    run_until_finished(bench, loop)
    assert loop.num_requests == 0
    assert bench.idle == 1
    assert bench.tokens == wanted


def test_closing_loses_nothing_that_was_computed():
    bench, loop, mailbox, wanted = make(overlaps=True, max_tokens=6)
    while bench.said.count("result") < 4:
        assert loop.turn()
    mailbox.close()
    before = len(bench.tokens)
    assert not loop.turn()
    assert len(bench.tokens) == before + 1
    assert bench.tokens == wanted[: len(bench.tokens)]


def test_a_step_that_cannot_begin_loses_nothing_of_the_one_before():
    bench, loop, _, wanted = make(overlaps=True)
    while bench.said.count("result") < 3:
        assert loop.turn()
    before = len(bench.tokens)
    bench.broken = True
    with pytest.raises(RuntimeError, match="gone"):
        loop.turn()
    assert len(bench.tokens) == before + 1
    assert bench.tokens == wanted[: len(bench.tokens)]


@dataclass
class SlowReads:
    """Reads that take longer than the gap between two steps, and less than a step. Is the runner and the puller."""

    world: TinyDecode
    mailbox: Mailbox[DecodeCommand]
    tokens: tuple[int, ...]
    pulls: list[Pull] = field(default_factory=list)

    def run(self, batch: Batch) -> StepOutput:
        output = self.world.runner.run(batch)
        for pull in self.pulls:
            for index, page in zip(pull.remote_pages, pull.local_pages, strict=True):
                data = page_bytes(self.tokens, index)
                self.world.memory.page(page)[: len(data)] = data
            self.mailbox.put(PullEvent(pull, PullOutcome.DONE, PAGE_BYTES, 0.1))
        self.pulls.clear()
        return output


def test_an_imported_row_joins_the_step_after_its_read_began():
    """Not the one after that: the read waits for no step of the other rows."""
    request = engine_request("imported", [0, 1, 1], stop=StopParams(max_tokens=4))
    world, mailbox = tiny_decode(digests=True, num_host_pages=0, token_budget=4), Mailbox[DecodeCommand](16)
    bench, reads = Bench(world), SlowReads(world, mailbox, request.tokens)
    hooks = DecodeHooks(bench.emit, reads.pulls.append, PageScrub(PageChecks(world.cache), PAGE_BYTES))
    turn = EngineTurn(WorkerRole.DECODE, world.cache, mailbox, bench.rest)
    loop = DecodeLoop(turn, world.imports, world.scheduler, world.import_policy, reads, hooks)
    for one, source in ((engine_request("local", [0, 1], stop=StopParams(max_tokens=9)), None), (request, "p")):
        answer, _ = world.import_policy.reserve(one.id, len(one.tokens), [], 0.0, 10.0)
        assert isinstance(answer, Reserved)
        mailbox.put(Claim(answer.id, one, None if source is None else WorkerId(source), 10.0, 0.0))
    assert loop.turn()
    assert world.scheduler.num_running == 1, "the local row decodes"
    pages = tuple(PageId(i) for i in range(ceil_div(len(request.tokens), PAGE_SIZE)))
    mailbox.put(PublishedChunk(request.id, 0, pages, true_digests(request.tokens, 0, len(pages))))
    mailbox.put(SealArrived(request.id, SealInfo(SampledToken(expected_output(request)[0]), None, len(pages))))
    for _ in range(3):  # in one of them no step runs: it waits for the read, in vain
        assert loop.turn()
    assert world.scheduler.num_running == 2
    assert bench.names == ["local", "imported"]
