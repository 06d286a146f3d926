"""Suspects, verdicts and quarantined keys on the wire: a real loop behind a real servicer, turned by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import grpc
import pytest

from baton.domain.fingerprint import Fingerprint
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.worker import WorkerRole
from baton.engine.mailbox import Mailbox
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.keys import page_keys
from baton.kv.page_checks import PageChecks
from baton.kv.quarantine import INCIDENT_S, MAX_INCIDENTS
from baton.rpc import codec
from baton.rpc.gen import common_pb2, handoff_pb2
from baton.services.prefill import loop as prefill_loop
from baton.services.prefill.commands import AddPrompt, PrefillCommand, PrefillEvent
from baton.services.prefill.loop import PrefillLoop
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.handoff.handoff_server import HandoffServicer
from tests.tiny_workers import NUM_PAGES, PAGE_BYTES, PAGE_SIZE, engine_request, tiny_prefill

Answer = TypeVar("Answer")
PROMPT = [0, 1, 1, 0, 1, 0]
CONTEXT = cast("grpc.aio.ServicerContext[Any, Any]", None)


class PolledMailbox(Mailbox[PrefillCommand]):
    """Never waits."""

    def take_all(self, timeout_s: float | None) -> list[PrefillCommand]:
        return super().take_all(0.0)


class Worker:
    """A prefill worker without thread and socket."""

    def __init__(self) -> None:
        self.world = world = tiny_prefill(lease_s=60.0, max_pinned_pages=NUM_PAGES)
        self.mailbox = PolledMailbox(64)
        self.events: list[PrefillEvent] = []
        self.num_unfit = 0
        checks = PageChecks(world.cache)
        turn = EngineTurn(WorkerRole.PREFILL, world.cache, self.mailbox, on_idle=lambda: None)
        scrub = PageScrub(checks, PAGE_BYTES, self.on_unfit)
        self.loop = PrefillLoop(turn, world.scheduler, world.exports, world.runner, scrub, self.events.extend)
        terms = LinkConfig(
            WorkerId("prefill-0"), Incarnation(1), "m", Fingerprint(()), {"stream": b""}, 0, NUM_PAGES, PAGE_BYTES, 1.0
        )
        self.servicer = HandoffServicer(terms, self.mailbox, HandoffLog(), None)

    def on_unfit(self) -> None:
        self.num_unfit += 1

    def seal(self, name: str, prompt: list[int] = PROMPT) -> list[common_pb2.SuspectPage]:
        """Computes a prompt; returns all its pages as suspects."""
        self.events.clear()
        self.mailbox.put(AddPrompt(engine_request(name, prompt), 0, 60.0, 0.0))
        for _ in range(4):
            self.loop.turn()
        chunks = [event for event in self.events if isinstance(event, PublishedChunk)]
        pairs = [pair for chunk in chunks for pair in zip(chunk.pages, chunk.digests or (), strict=True)]
        return [common_pb2.SuspectPage(index=i, page=page, digests=[digest]) for i, (page, digest) in enumerate(pairs)]

    def flip(self, suspect: common_pb2.SuspectPage) -> None:
        self.world.memory.page(PageId(suspect.page))[0] ^= 1

    async def call(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        """Awaits the servicer while the loop turns."""
        task = asyncio.create_task(answer)
        while not task.done():
            await asyncio.sleep(0)
            self.loop.turn()
        return task.result()

    async def abort(self, name: str, suspects: list[common_pb2.SuspectPage]) -> common_pb2.PageVerdict:
        id = codec.encode_id(engine_request(name, PROMPT).id)
        request = common_pb2.AbortRequest(id=id, reason="integrity_failure", suspects=suspects)
        return (await self.call(self.servicer.Abort(request, CONTEXT))).verdict

    async def renew(self, seen: int) -> handoff_pb2.RenewReply:
        request = handoff_pb2.RenewRequest(worker_id="decode-0", incarnation=1, quarantine_seen=seen)
        return await self.call(self.servicer.Renew(request, CONTEXT))


async def test_a_page_that_rotted_at_the_source():
    worker = Worker()
    suspects = worker.seal("a")
    worker.flip(suspects[1])
    assert await worker.abort("a", suspects) == common_pb2.PAGE_VERDICT_SOURCE
    assert len(worker.world.exports) == 0
    assert len(worker.world.cache) == 1


async def test_pages_that_were_damaged_on_their_way():
    worker = Worker()
    assert await worker.abort("a", worker.seal("a")) == common_pb2.PAGE_VERDICT_LINK
    assert len(worker.world.exports) == 0
    assert len(worker.world.cache) == 3


async def test_an_abort_without_suspects_has_no_verdict():
    worker = Worker()
    worker.seal("a")
    assert await worker.abort("a", []) == common_pb2.PAGE_VERDICT_UNSPECIFIED
    worker.loop.turn()
    assert len(worker.world.exports) == 0


async def test_an_export_that_ended_with_a_wrong_page_is_the_source_s_fault():
    """Its pages are written again while decode reads: a mismatch that says nothing about the link."""
    worker = Worker()
    first = worker.seal("a")
    others = worker.seal("b")
    worker.flip(first[0])
    assert await worker.abort("a", first[:1]) == common_pb2.PAGE_VERDICT_SOURCE
    assert await worker.abort("b", others[1:]) == common_pb2.PAGE_VERDICT_SOURCE


async def test_renewals_carry_quarantined_keys_until_they_are_seen():
    worker = Worker()
    suspects = worker.seal("a")
    assert not (await worker.renew(0)).quarantined
    worker.flip(suspects[1])
    await worker.abort("a", suspects)
    key = page_keys(PROMPT, PAGE_SIZE, "")[1]
    for _ in range(2):  # the first reply is lost
        reply = await worker.renew(0)
        assert (list(reply.quarantined), reply.quarantine_number) == ([key], 1)
    assert not (await worker.renew(1)).quarantined


@pytest.mark.parametrize("num_incidents", [MAX_INCIDENTS - 1, MAX_INCIDENTS])
async def test_a_worker_with_three_incidents_is_unfit(num_incidents: int, monkeypatch: pytest.MonkeyPatch):
    worker = Worker()
    for number in range(num_incidents):
        monkeypatch.setattr(prefill_loop, "monotonic_s", lambda now=number * 2 * INCIDENT_S: now)
        suspects = worker.seal(f"r{number}", [number % 2, number // 2])
        worker.flip(suspects[0])
        await worker.abort(f"r{number}", suspects)
    worker.loop.turn()
    assert worker.num_unfit == (num_incidents == MAX_INCIDENTS)


async def test_a_burst_is_one_incident_and_is_found_as_a_whole():
    """One wrong page makes the scrubber look at all others at once."""
    worker = Worker()
    prompts = {f"r{number}": [number % 2, number // 2, 1, 1] for number in range(3)}
    first, *others = [worker.seal(name, prompt) for name, prompt in prompts.items()]
    for suspects in (first, *others):
        worker.flip(suspects[-1])
    assert await worker.abort("r0", first) == common_pb2.PAGE_VERDICT_SOURCE
    for _ in range(3):
        worker.loop.turn()
    assert worker.world.scheduler.quarantine.num_faults == 3
    assert len(worker.world.exports) == 0
    assert worker.num_unfit == 0
