"""The dispatcher against mock workers over real gRPC: every way through the house, and every way out of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from baton.domain.errors import (
    Broken,
    ContextOverflow,
    DeadlineExceeded,
    Draining,
    Interrupted,
    NoWorkers,
    Overloaded,
    Superseded,
    WorkerLost,
)
from baton.domain.ids import AttemptId, RequestId, new_incarnation
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason, SamplingParams, StopParams
from baton.domain.worker import WorkerStatus
from baton.kv.keys import page_keys
from baton.rpc.client import Channels
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from baton.state.writer import BookWriter
from baton.telemetry.timeline import Moment
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.admission import DoorLimits
from services.router.dispatch.booking import BookingLimits
from services.router.dispatch.dispatcher import DispatchLimits, Identity, TokenDispatcher
from services.router.dispatch.fleet import Fleet, FleetLimits
from services.router.generation import GenerationChunk, GenerationJob
from tests.mock_workers import (
    MODEL,
    PAGE_SIZE,
    At,
    Busy,
    Die,
    Fail,
    Hold,
    MockCluster,
    MockDecode,
    MockPrefill,
    Phase,
    Skip,
    token_at,
)

pytestmark = pytest.mark.timeout(30)
PROMPT = tuple(range(1, 11))
LIMITS = DispatchLimits(
    door=DoorLimits(max_running_requests=8, max_queued_requests=8, max_queued_tokens=1000),
    booking=BookingLimits(promise_timeout_s=2.0, patience_s=0.3),
    max_attempts=3,
)
FLEET_LIMITS = FleetLimits(worker_ttl_s=0.5, heartbeat_interval_s=0.05, max_step_age_s=30.0)
ONE_AT_A_TIME = replace(LIMITS, door=DoorLimits(1, 2, 25))


@dataclass(slots=True)
class Diary:
    """A witness that remembers."""

    entries: list[str] = field(default_factory=list)

    def on_moment(self, id: RequestId, moment: Moment) -> None:
        self.entries.append(moment.value)

    def on_retry(self, id: RequestId) -> None:
        self.entries.append("retry")


@dataclass(slots=True)
class World:
    """A dispatcher and all it talks to."""

    dispatcher: TokenDispatcher
    fleet: Fleet
    cluster: MockCluster
    book: MemoryBook
    writer: BookWriter
    diary: Diary

    @property
    def prefill(self) -> MockPrefill:
        return self.cluster.prefills[0]

    @property
    def decode(self) -> MockDecode:
        return self.cluster.decodes[0]

    async def generate(self, job: GenerationJob) -> list[GenerationChunk]:
        return [chunk async for chunk in self.dispatcher.run(self.dispatcher.admit(job))]

    async def state(self, job: GenerationJob) -> RequestState:
        """Where the reception book has the request, once everything is written."""
        await self.writer.close()
        record = await self.book.get(job.id)
        assert record is not None
        return record.state


@asynccontextmanager
async def world(
    prefill: Sequence[Sequence[At]] = ((),),
    decode: Sequence[Sequence[At]] = ((),),
    limits: DispatchLimits = LIMITS,
    linked: bool = True,
) -> AsyncIterator[World]:
    book = MemoryBook(BookOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
    cluster = MockCluster(
        book,
        [MockPrefill(f"prefill-{n}", script) for n, script in enumerate(prefill)],
        [MockDecode(f"decode-{n}", script) for n, script in enumerate(decode)],
        num_probe_bytes=4096 if linked else 0,
    )
    channels, diary = Channels(), Diary()
    fleet = Fleet(book, channels, MODEL, FLEET_LIMITS)
    aborts = Aborts(fleet)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(book.close)
        stack.push_async_callback(cluster.stop)
        stack.push_async_callback(channels.close)
        stack.push_async_callback(fleet.close)
        stack.push_async_callback(aborts.close)
        writer = await stack.enter_async_context(BookWriter(book))
        dispatcher = TokenDispatcher(fleet, aborts, writer, diary, Identity("router-test", MODEL), limits)
        await cluster.start()
        fleet.start()
        async with asyncio.timeout(5):
            await fleet.changed()
        yield World(dispatcher, fleet, cluster, book, writer, diary)
        assert dispatcher.num_open == 0, "a ticket was never given back"
        async with asyncio.timeout(5):
            await dispatcher.wait_empty()


def job(
    name: str = "r", max_tokens: int = 5, deadline_s: float = 10.0, prompt: tuple[int, ...] = PROMPT
) -> GenerationJob:
    return GenerationJob(RequestId(name), prompt, SamplingParams(seed=7), StopParams(max_tokens), "", deadline_s)


def tokens(chunks: Sequence[GenerationChunk]) -> list[tuple[int, int]]:
    return [(token.index, token.token) for chunk in chunks for token in chunk.tokens]


def scripted(num_tokens: int) -> list[tuple[int, int]]:
    return [(index, token_at(index)) for index in range(num_tokens)]


async def two_looks(w: World) -> None:
    """Waits until the fleet has certainly read what is announced now: one look may be under way already."""
    async with asyncio.timeout(5):
        await w.fleet.changed()
        await w.fleet.changed()


async def test_tokens_arrive_as_scripted_and_every_stage_is_passed():
    async with world() as w:
        chunks = await w.generate(job())
        assert tokens(chunks) == scripted(5)
        assert [chunk.finish for chunk in chunks] == [None] * 4 + [FinishReason.LENGTH]
        assert w.diary.entries == ["admit", "queue", "dispatch", "prefill", "land"]
        assert await w.state(job()) is RequestState.FINISHED
        assert w.prefill.aborts == w.decode.aborts == []


async def test_the_workers_are_told_what_they_need():
    async with world() as w:
        w.decode.decode_prefix_len = 8
        chunks = await w.generate(job())
        promise, generate = w.decode.promises[0], w.decode.generates[0]
        assert list(promise.page_keys) == page_keys(PROMPT, PAGE_SIZE, "")
        assert promise.num_tokens == len(PROMPT)
        assert generate.promise_id == "decode-0-1"
        assert (generate.prefill_id, generate.prefill_incarnation) == (w.prefill.id, w.prefill.incarnation)
        assert w.prefill.requests == w.decode.requests
        assert w.prefill.requests[0].id == AttemptId(RequestId("r"), 1)
        assert {chunk.num_cached_tokens for chunk in chunks} == {8}


async def test_a_sequence_that_its_first_token_ends_frees_the_promise():
    async with world() as w:
        chunks = await w.generate(job(max_tokens=1))
        assert tokens(chunks) == scripted(1)
        assert chunks[0].finish is FinishReason.LENGTH
        assert await w.decode.aborted(AttemptId(RequestId("r"), 1)) == "finished"
        assert await w.state(job()) is RequestState.FINISHED


@pytest.mark.parametrize(
    ("prefill", "decode", "num_before"),
    [
        pytest.param((), (At(Phase.PROMISE, Hold()),), 0, id="promising"),
        pytest.param((At(Phase.ACCEPT, Hold()),), (At(Phase.LAND, Hold()),), 0, id="not yet accepted"),
        pytest.param((At(Phase.SEAL, Hold()),), (At(Phase.LAND, Hold()),), 0, id="prefilling"),
        pytest.param((), (At(Phase.LAND, Hold()),), 1, id="sealed"),
        pytest.param((), (At(Phase.DECODE, Hold(), index=3),), 3, id="decoding"),
    ],
)
async def test_a_cancelled_request_is_aborted_on_its_workers_within_a_second(prefill, decode, num_before):
    async with world([prefill], [decode]) as w:
        seen: list[GenerationChunk] = []
        ready = asyncio.Event()

        async def consume() -> None:
            async with aclosing(w.dispatcher.run(w.dispatcher.admit(job()))) as chunks:
                if num_before == 0:
                    ready.set()
                async for chunk in chunks:
                    seen.append(chunk)
                    if len(seen) == num_before:
                        ready.set()

        client = asyncio.create_task(consume())
        async with asyncio.timeout(5):
            await ready.wait()
        held = (*prefill, *decode)[0]
        worker = w.prefill if prefill else w.decode
        await worker.reached(held.phase, times=3 if held.index else 1)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        id = AttemptId(RequestId("r"), 1)
        await w.decode.aborted(id, within_s=1.0)
        if held.phase is not Phase.PROMISE:
            assert await w.prefill.aborted(id, within_s=1.0) == "cancelled"
        assert tokens(seen) == scripted(num_before)
        assert await w.state(job()) is RequestState.CANCELLED


async def test_closing_the_generator_between_two_tokens_aborts_too():
    async with world() as w:
        chunks = w.dispatcher.run(w.dispatcher.admit(job()))
        assert tokens([await anext(chunks), await anext(chunks)]) == scripted(2)
        await chunks.aclose()
        for worker in (w.prefill, w.decode):
            assert await worker.aborted(AttemptId(RequestId("r"), 1), within_s=1.0) == "cancelled"


async def test_a_request_cancelled_in_the_queue_never_reaches_a_worker():
    async with world([(At(Phase.SEAL, Hold()),)], [(At(Phase.LAND, Hold()),)], limits=ONE_AT_A_TIME) as w:
        first = asyncio.create_task(w.generate(job("first")))
        await w.prefill.reached(Phase.SEAL)
        second = asyncio.create_task(w.generate(job("second")))
        third_ticket = w.dispatcher.admit(job("third", prompt=(1, 2)))
        second.cancel()
        w.dispatcher.release(third_ticket)
        w.dispatcher.release(third_ticket)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert [promise.id.request_id for promise in w.decode.promises] == ["first"]
        assert await w.state(job("third")) is RequestState.CANCELLED


async def test_a_decode_worker_that_dies_while_decoding_is_replaced_without_gap_or_duplicate():
    async with world(decode=[(At(Phase.DECODE, Hold(), index=3),), ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # second choice
        await two_looks(w)
        chunks = w.dispatcher.run(w.dispatcher.admit(job(max_tokens=7)))
        seen = [await anext(chunks) for _ in range(3)]
        await first.stop()
        seen += [chunk async for chunk in chunks]
        assert tokens(seen) == scripted(7)
        replay = second.requests[0]
        assert replay.id == AttemptId(RequestId("r"), 2)
        assert replay.tokens == (*PROMPT, token_at(0), token_at(1), token_at(2))
        assert replay.num_prompt_tokens == len(PROMPT)
        assert w.diary.entries.count("retry") == 1
        assert await w.prefill.aborted(AttemptId(RequestId("r"), 1)) == "worker_lost"
        assert await w.state(job()) is RequestState.FINISHED


async def test_a_prefill_worker_that_dies_before_the_seal_is_replaced():
    async with world(prefill=[(At(Phase.SEAL, Die()),), ()]) as w:
        await w.cluster.change_load(w.cluster.prefills[1], waiting_tokens=100)
        await two_looks(w)
        assert tokens(await w.generate(job())) == scripted(5)
        assert w.cluster.prefills[1].requests[0].id.attempt == 2
        assert await w.decode.aborted(AttemptId(RequestId("r"), 1)) == "worker_lost"


async def test_a_prefill_worker_that_dies_after_the_seal_is_not_missed():
    async with world([(At(Phase.SEALED, Die()),)], [(At(Phase.DECODE, Hold(), index=1),)]) as w:
        run = asyncio.create_task(w.generate(job()))
        await w.prefill.reached(Phase.SEALED)
        await w.decode.reached(Phase.DECODE)
        await w.prefill.stop()
        w.prefill.incarnation = new_incarnation()  # it is even known to be gone
        await w.cluster.announce()
        await two_looks(w)
        w.decode.release()
        assert tokens(await run) == scripted(5)
        assert len(w.decode.requests) == len(w.prefill.requests) == 1


@pytest.mark.parametrize("code", ["link_broken", "lease_ended", "integrity_failure", "sent_back", "worker_lost", "odd"])
async def test_a_failure_that_decode_reports_is_replayed(code):
    async with world(decode=[(At(Phase.DECODE, Fail(code), index=2),)]) as w:
        assert tokens(await w.generate(job())) == scripted(5)
        assert [request.id.attempt for request in w.decode.requests] == [1, 2]


@pytest.mark.parametrize("code", ["sent_back", "link_broken"])
async def test_a_replay_avoids_what_the_attempt_was_lost_on(code):
    async with world(decode=[(At(Phase.DECODE, Fail(code), index=2),), ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # otherwise second choice
        await two_looks(w)
        assert tokens(await w.generate(job())) == scripted(5)
        assert [len(decode.requests) for decode in (first, second)] == [1, 1]


async def test_a_worker_stuck_in_a_step_loses_its_attempts():
    async with world(decode=[(At(Phase.DECODE, Hold(), index=2),), ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)
        await two_looks(w)
        run = asyncio.create_task(w.generate(job()))
        await first.reached(Phase.DECODE, times=2)
        await w.cluster.change_load(first, step_age_s=31.0)
        assert tokens(await run) == scripted(5)
        assert await first.aborted(AttemptId(RequestId("r"), 1)) == "worker_lost"
        assert second.requests[0].id.attempt == 2


async def test_a_missing_token_index_is_never_passed_on():
    async with world(decode=[(At(Phase.DECODE, Skip(), index=2),)]) as w:
        assert tokens(await w.generate(job())) == scripted(5)
        assert await w.decode.aborted(AttemptId(RequestId("r"), 1)) == "integrity_failure"


async def test_attempts_are_bounded_and_the_last_error_is_raised():
    async with world(decode=[(At(Phase.LAND, Fail("link_broken"), times=9),)]) as w:
        with pytest.raises(Interrupted) as failure:
            await w.generate(job())
        assert failure.value.code == "link_broken"
        assert [request.id.attempt for request in w.decode.requests] == [1, 2, 3]
        assert await w.state(job()) is RequestState.FAILED


async def test_a_fenced_attempt_is_not_tried_again():
    async with world(decode=[(At(Phase.PROMISE, Fail("superseded")),)]) as w:
        with pytest.raises(Superseded):
            await w.generate(job())
        assert len(w.decode.promises) == 1


async def test_busy_is_asked_again_until_there_is_room():
    async with world(decode=[(At(Phase.PROMISE, Busy(), times=3),)]) as w:
        assert tokens(await w.generate(job())) == scripted(5)
        assert [promise.id.attempt for promise in w.decode.promises] == [1, 1, 1, 1]


async def test_a_busy_worker_sends_the_attempt_to_another():
    scripts = [(At(Phase.PROMISE, Busy(60.0)),), (At(Phase.PROMISE, Busy(60.0)),)]
    async with world(decode=scripts) as w:
        first, second = w.cluster.decodes
        run = asyncio.create_task(w.generate(job()))
        await first.reached(Phase.PROMISE)
        await second.reached(Phase.PROMISE)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert len(first.promises) == len(second.promises) == 1


async def test_a_worker_that_drains_is_left_alone():
    async with world(decode=[(At(Phase.PROMISE, Fail("draining"), times=9),), ()]) as w:
        for name in ("a", "b"):
            assert tokens(await w.generate(job(name))) == scripted(5)
        assert len(w.cluster.decodes[1].requests) == 2


async def test_a_lost_answer_to_a_promise_is_aborted_and_counts_as_an_attempt():
    async with world(decode=[(At(Phase.PROMISE, Die()),), ()]) as w:
        await w.cluster.change_load(w.cluster.decodes[1], running_rows=4)
        await two_looks(w)
        assert tokens(await w.generate(job())) == scripted(5)
        assert w.cluster.decodes[1].requests[0].id.attempt == 2
        assert await w.state(job()) is RequestState.FINISHED


async def test_a_restarted_worker_ends_the_attempts_of_its_former_life():
    async with world(decode=[(At(Phase.DECODE, Hold(), index=2),)]) as w:
        run = asyncio.create_task(w.generate(job()))
        await w.decode.reached(Phase.DECODE, times=2)
        w.decode.incarnation = new_incarnation()
        await w.cluster.announce()
        assert tokens(await run) == scripted(5)
        assert [request.id.attempt for request in w.decode.requests] == [1, 2]


async def test_a_worker_restarted_while_it_is_asked_for_a_promise_is_asked_again():
    async with world(decode=[(At(Phase.PROMISE, Hold()),)]) as w:
        run = asyncio.create_task(w.generate(job()))
        await w.decode.reached(Phase.PROMISE)
        w.decode.incarnation = new_incarnation()
        await w.cluster.announce()
        assert tokens(await run) == scripted(5)
        assert [promise.id.attempt for promise in w.decode.promises] == [1, 2]


async def test_a_worker_that_vanished_is_waited_for_and_then_the_loss_is_told():
    async with world(decode=[(At(Phase.DECODE, Die(), index=2),)]) as w:
        with pytest.raises(WorkerLost):
            await w.generate(job())
        assert await w.state(job()) is RequestState.FAILED


async def test_a_worker_that_comes_back_in_time_continues_the_request():
    patient = replace(LIMITS, booking=BookingLimits(promise_timeout_s=2.0, patience_s=5.0))
    async with world(decode=[(At(Phase.DECODE, Die(), index=2),)], limits=patient) as w:
        run = asyncio.create_task(w.generate(job()))
        await w.decode.reached(Phase.DECODE, times=2)
        await w.prefill.aborted(AttemptId(RequestId("r"), 1))
        newcomer = MockDecode("decode-9")
        w.cluster.decodes.append(newcomer)
        await newcomer.start()
        await w.cluster.announce()
        assert tokens(await run) == scripted(5)
        assert newcomer.requests[0].id.attempt == 2


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param((), (At(Phase.PROMISE, Busy(), times=10_000),), id="no room"),
        pytest.param((), (At(Phase.PROMISE, Hold()),), id="promise unanswered"),
        pytest.param((At(Phase.SEAL, Hold()),), (), id="prefilling"),
        pytest.param((), (At(Phase.DECODE, Hold(), index=2),), id="decoding"),
    ],
)
async def test_the_deadline_ends_a_request_in_any_phase(prefill, decode):
    async with world([prefill], [decode]) as w:
        with pytest.raises(DeadlineExceeded):
            await w.generate(job(deadline_s=0.3))
        assert await w.state(job()) is RequestState.FAILED


async def test_the_deadline_counts_in_the_queue_as_well():
    async with world([(At(Phase.SEAL, Hold()),)], limits=ONE_AT_A_TIME) as w:
        first = asyncio.create_task(w.generate(job("first")))
        await w.prefill.reached(Phase.SEAL)
        with pytest.raises(DeadlineExceeded):
            await w.generate(job("second", deadline_s=0.1))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_the_queue_is_served_in_order_and_bounded():
    async with world([(At(Phase.SEAL, Hold()),)], limits=ONE_AT_A_TIME) as w:
        first = asyncio.create_task(w.generate(job("first")))
        await w.prefill.reached(Phase.SEAL)
        tickets = [w.dispatcher.admit(job(name)) for name in ("second", "third")]
        with pytest.raises(Overloaded) as refusal:
            w.dispatcher.admit(job("fourth"))
        assert refusal.value.retry_after_s is not None
        runs = [asyncio.create_task(consume(w.dispatcher.run(ticket))) for ticket in reversed(tickets)]
        first.cancel()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 2
        assert [request.id.request_id for request in w.decode.requests][-2:] == ["second", "third"]


async def consume(chunks: AsyncIterator[GenerationChunk]) -> list[GenerationChunk]:
    return [chunk async for chunk in chunks]


async def test_without_a_link_that_has_moved_bytes_there_are_no_workers():
    async with world(linked=False) as w:
        ready, detail = w.fleet.readiness()
        assert not ready
        assert detail == "no linked prefill/decode pair (1 prefill, 1 decode ready)"
        with pytest.raises(NoWorkers) as refusal:
            w.dispatcher.admit(job())
        assert refusal.value.retry_after_s is not None


async def test_a_worker_that_announces_its_drain_takes_nothing_new():
    async with world() as w:
        assert w.fleet.readiness() == (True, "1 linked prefill/decode pairs")
        w.decode.status = WorkerStatus.DRAINING
        await w.cluster.announce()
        await two_looks(w)
        with pytest.raises(NoWorkers):
            w.dispatcher.admit(job())


async def test_a_prompt_that_no_worker_could_ever_hold_is_refused_with_the_numbers():
    async with world() as w:
        with pytest.raises(ContextOverflow, match=r"200 prompt tokens .* more than 200 tokens"):
            w.dispatcher.admit(job(prompt=tuple(range(200))))


async def test_an_answer_is_cut_to_what_a_worker_can_hold():
    async with world() as w:
        chunks = await w.generate(job(max_tokens=5000, prompt=tuple(range(190))))
        assert tokens(chunks) == scripted(10)
        assert chunks[-1].finish is FinishReason.LENGTH


async def test_an_id_can_be_used_by_one_request_at_a_time():
    async with world() as w:
        ticket = w.dispatcher.admit(job())
        with pytest.raises(Broken):
            w.dispatcher.admit(job())
        w.dispatcher.release(ticket)
        with pytest.raises(Broken):
            await consume(w.dispatcher.run(ticket))
        assert tokens(await w.generate(job("other"))) == scripted(5)


async def test_draining_refuses_new_requests_and_finishes_running_ones():
    async with world(decode=[(At(Phase.PROMISE, Busy(), times=5),)]) as w:
        run = asyncio.create_task(w.generate(job()))
        await w.decode.reached(Phase.PROMISE)
        w.dispatcher.drain()
        with pytest.raises(Draining):
            w.dispatcher.admit(job("late"))
        async with asyncio.timeout(5):
            await w.dispatcher.wait_empty()
        assert tokens(await run) == scripted(5)


async def test_the_same_prompt_goes_back_to_the_workers_that_hold_it():
    async with world(prefill=[(), ()], decode=[(), ()]) as w:
        for name in ("a", "b", "c"):
            await w.generate(job(name, prompt=tuple(range(100))))
        assert sorted(len(prefill.requests) for prefill in w.cluster.prefills) == [0, 3]
        assert sorted(len(decode.requests) for decode in w.cluster.decodes) == [0, 3]


async def test_different_prompts_are_spread():
    async with world(prefill=[(), ()], decode=[(), ()]) as w:
        jobs = [job(str(n), prompt=tuple(range(n, n + 40))) for n in range(4)]
        for chunks in await asyncio.gather(*(w.generate(one) for one in jobs)):
            assert tokens(chunks) == scripted(5)
        assert [len(prefill.requests) for prefill in w.cluster.prefills] == [2, 2]
        assert [len(decode.requests) for decode in w.cluster.decodes] == [2, 2]


async def test_the_next_turn_of_a_dialogue_goes_where_the_last_answer_was_decoded():
    """The prompt of the first turn fills no page: only what decode computed can draw the second turn."""
    async with world(decode=[(), ()]) as w:
        answer = await w.generate(job("turn-1", max_tokens=21, prompt=(1, 2, 3)))
        first = next(decode for decode in w.cluster.decodes if decode.requests)
        for number in range(3):
            turn = (1, 2, 3, *(token for _, token in tokens(answer)), 77 + number)
            await w.generate(job(f"turn-2-{number}", prompt=turn, max_tokens=1))
        assert len(first.promises) == 4
