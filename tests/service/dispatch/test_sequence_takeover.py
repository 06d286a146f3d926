"""The dispatcher with sequences that were taken over, and the journal that it leaves for the next router."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import DeadlineExceeded, Overloaded
from baton.domain.ids import AttemptId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.store.store import JournalPart
from services.router.generation import SequenceSpec
from tests.mock_workers import Hold, Phase, ScriptedAction, token_at
from tests.service.dispatch.dispatch_world import (
    ONE_AT_A_TIME,
    PROMPT,
    World,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)

pytestmark = pytest.mark.timeout(30)


def emitted(num_tokens: int) -> tuple[OutputToken, ...]:
    return tuple(OutputToken(index, token_at(index)) for index in range(num_tokens))


async def left_by_its_client(w: World, first: SequenceSpec, num_tokens: int) -> SequenceSpec:
    """The sequence as it is carried on after its client left with `num_tokens`, and somebody claimed its call."""
    chunks = w.dispatcher.run(w.admit(first))
    for _ in range(num_tokens):
        await anext(chunks)
    await chunks.aclose()
    await w.writer.flush(5.0)
    assert await w.store.advance(AttemptId(first.id, 2), RequestEvent.RESUME) is RequestState.QUEUED
    return replace(first, attempt=2, emitted=emitted(num_tokens), num_cached_tokens=8)


async def journal(w: World, of: SequenceSpec) -> JournalPart:
    await w.writer.flush(5.0)
    return await w.store.read_journal(of.id, 0, 0.0)


async def test_a_carried_job_goes_on_where_it_was_under_the_attempt_it_was_given():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=3),)]) as w:
        carried = await left_by_its_client(w, sequence(max_tokens=6), 3)
        chunks = await w.generate(carried)
        assert tokens(chunks) == scripted(6)[3:]
        assert {chunk.num_cached_tokens for chunk in chunks} == {8}
        second = w.decode.requests[-1]
        assert (second.id.attempt, second.tokens) == (2, (*PROMPT, *map(token_at, range(3))))
        assert await journal(w, carried) == JournalPart(emitted(6), 8, FinishReason.LENGTH, "")
        assert await w.state(carried) is RequestState.FINISHED


async def test_a_carried_job_that_is_lost_again_has_all_its_tries():
    script = [ScriptedAction(Phase.DECODE, Hold(), index=3), ScriptedAction(Phase.DECODE, Hold(), index=4)]
    async with world(decode=[script, ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # second choice
        await two_refreshes(w)
        carried = replace(await left_by_its_client(w, sequence(max_tokens=6), 3), emitted=emitted(3))
        chunks = w.dispatcher.run(w.admit(carried))
        seen = [await anext(chunks)]
        await first.stop()
        seen += [chunk async for chunk in chunks]
        assert tokens(seen) == scripted(6)[3:]
        assert second.requests[-1].id.attempt == 3


async def test_a_carried_job_is_not_turned_away():
    async with world(limits=ONE_AT_A_TIME) as w:
        inside = [w.admit(sequence(name, prompt=(1, 2))) for name in ("first", "second", "third")]
        with pytest.raises(Overloaded):
            w.admit(sequence("fourth"))
        admitted = w.admit(replace(sequence("carried"), emitted=emitted(1)))
        for one in (*inside, admitted):
            w.dispatcher.release(one)


async def test_a_job_whose_tokens_are_all_there_asks_no_worker():
    async with world() as w:
        whole = replace(sequence(max_tokens=3), emitted=emitted(3), num_cached_tokens=2)
        [chunk] = await w.generate(whole)
        assert (chunk.tokens, chunk.num_cached_tokens, chunk.finish) == ((), 2, FinishReason.LENGTH)
        assert w.decode.reservations == []
        assert await journal(w, whole) == JournalPart(emitted(3), 2, FinishReason.LENGTH, "")


async def test_a_text_that_is_complete_ends_its_job_and_aborts_its_workers():
    async with world() as w:
        admitted = w.admit(sequence())
        chunks = w.dispatcher.run(admitted)
        assert tokens([await anext(chunks), await anext(chunks)]) == scripted(2)
        admitted.complete()
        await chunks.aclose()
        for worker in (w.prefill, w.decode):
            await worker.aborted(AttemptId(sequence().id, 1), within_s=1.0)
        assert await journal(w, sequence()) == JournalPart(emitted(2), 0, FinishReason.STOP, "")
        assert await w.state(sequence()) is RequestState.FINISHED


async def test_a_job_that_was_complete_before_it_ran_gives_its_ticket_back():
    async with world() as w:
        admitted = w.admit(sequence())
        admitted.complete()
        w.dispatcher.release(admitted)
        assert (await journal(w, sequence())).finish is FinishReason.STOP
        assert await w.state(sequence()) is RequestState.CANCELLED


async def test_a_failure_ends_the_journal_and_a_hang_up_does_not():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=2, times=2),)]) as w:
        with pytest.raises(DeadlineExceeded):
            await w.generate(sequence("late", deadline_s=0.3))
        assert await journal(w, sequence("late")) == JournalPart(emitted(2), 0, None, "deadline_exceeded")
        chunks = w.dispatcher.run(w.admit(sequence("left")))
        assert tokens([await anext(chunks), await anext(chunks)]) == scripted(2)
        await chunks.aclose()
        assert await journal(w, sequence("left")) == JournalPart(emitted(2), 0, None, "")
