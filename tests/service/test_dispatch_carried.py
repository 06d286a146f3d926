"""The dispatcher with jobs that are under way already, and what it leaves in the journal for whoever comes next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import DeadlineExceeded, Overloaded
from baton.domain.ids import AttemptId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.state.base import JournalPart
from services.router.generation import GenerationJob
from tests.mock_workers import At, Hold, Phase, token_at
from tests.service.dispatch_world import ONE_AT_A_TIME, PROMPT, World, job, scripted, tokens, two_looks, world

pytestmark = pytest.mark.timeout(30)


def emitted(num_tokens: int) -> tuple[OutputToken, ...]:
    return tuple(OutputToken(index, token_at(index)) for index in range(num_tokens))


async def left_by_its_client(w: World, first: GenerationJob, num_tokens: int) -> GenerationJob:
    """The job as it is carried on after its client left with `num_tokens`, and somebody claimed its call."""
    chunks = w.dispatcher.run(w.dispatcher.admit(first))
    for _ in range(num_tokens):
        await anext(chunks)
    await chunks.aclose()
    await w.writer.flush(5.0)
    assert await w.book.advance(AttemptId(first.id, 2), RequestEvent.RESUME) is RequestState.QUEUED
    return replace(first, attempt=2, emitted=emitted(num_tokens), num_cached_tokens=8)


async def journal(w: World, of: GenerationJob) -> JournalPart:
    await w.writer.flush(5.0)
    return await w.book.read_journal(of.id, 0, 0.0)


async def test_a_carried_job_goes_on_where_it_was_under_the_attempt_it_was_given():
    async with world(decode=[(At(Phase.DECODE, Hold(), index=3),)]) as w:
        carried = await left_by_its_client(w, job(max_tokens=6), 3)
        chunks = await w.generate(carried)
        assert tokens(chunks) == scripted(6)[3:]
        assert {chunk.num_cached_tokens for chunk in chunks} == {8}
        second = w.decode.requests[-1]
        assert (second.id.attempt, second.tokens) == (2, (*PROMPT, *map(token_at, range(3))))
        assert await journal(w, carried) == JournalPart(emitted(6), 8, FinishReason.LENGTH, "")
        assert await w.state(carried) is RequestState.FINISHED


async def test_a_carried_job_that_is_lost_again_has_all_its_tries():
    script = [At(Phase.DECODE, Hold(), index=3), At(Phase.DECODE, Hold(), index=4)]
    async with world(decode=[script, ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # second choice
        await two_looks(w)
        carried = replace(await left_by_its_client(w, job(max_tokens=6), 3), emitted=emitted(3))
        chunks = w.dispatcher.run(w.dispatcher.admit(carried))
        seen = [await anext(chunks)]
        await first.stop()
        seen += [chunk async for chunk in chunks]
        assert tokens(seen) == scripted(6)[3:]
        assert second.requests[-1].id.attempt == 3


async def test_a_carried_job_is_not_turned_away():
    async with world(limits=ONE_AT_A_TIME) as w:
        inside = [w.dispatcher.admit(job(name, prompt=(1, 2))) for name in ("first", "second", "third")]
        with pytest.raises(Overloaded):
            w.dispatcher.admit(job("fourth"))
        ticket = w.dispatcher.admit(replace(job("carried"), emitted=emitted(1)))
        for one in (*inside, ticket):
            w.dispatcher.release(one)


async def test_a_job_whose_tokens_are_all_there_asks_no_worker():
    async with world() as w:
        whole = replace(job(max_tokens=3), emitted=emitted(3), num_cached_tokens=2)
        [chunk] = await w.generate(whole)
        assert (chunk.tokens, chunk.num_cached_tokens, chunk.finish) == ((), 2, FinishReason.LENGTH)
        assert w.decode.promises == []
        assert await journal(w, whole) == JournalPart(emitted(3), 2, FinishReason.LENGTH, "")


async def test_a_text_that_is_complete_ends_its_job_and_aborts_its_workers():
    async with world() as w:
        ticket = w.dispatcher.admit(job())
        chunks = w.dispatcher.run(ticket)
        assert tokens([await anext(chunks), await anext(chunks)]) == scripted(2)
        ticket.complete()
        await chunks.aclose()
        for worker in (w.prefill, w.decode):
            await worker.aborted(AttemptId(job().id, 1), within_s=1.0)
        assert await journal(w, job()) == JournalPart(emitted(2), 0, FinishReason.STOP, "")
        assert await w.state(job()) is RequestState.FINISHED


async def test_a_job_that_was_complete_before_it_ran_gives_its_ticket_back():
    async with world() as w:
        ticket = w.dispatcher.admit(job())
        ticket.complete()
        w.dispatcher.release(ticket)
        assert (await journal(w, job())).finish is FinishReason.STOP
        assert await w.state(job()) is RequestState.CANCELLED


async def test_a_failure_ends_the_journal_and_a_hang_up_does_not():
    async with world(decode=[(At(Phase.DECODE, Hold(), index=2, times=2),)]) as w:
        with pytest.raises(DeadlineExceeded):
            await w.generate(job("late", deadline_s=0.3))
        assert await journal(w, job("late")) == JournalPart(emitted(2), 0, None, "deadline_exceeded")
        chunks = w.dispatcher.run(w.dispatcher.admit(job("left")))
        assert tokens([await anext(chunks), await anext(chunks)]) == scripted(2)
        await chunks.aclose()
        assert await journal(w, job("left")) == JournalPart(emitted(2), 0, None, "")
