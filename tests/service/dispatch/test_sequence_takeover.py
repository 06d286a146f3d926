"""The dispatcher with sequences that were taken over, and the journal that it leaves for the next router."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import DeadlineExceeded, Overloaded
from baton.domain.ids import AttemptId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.services.router.generation import SequenceSpec
from baton.store.store import JournalPart
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

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("both_streams")]


def emitted(num_tokens: int) -> tuple[OutputToken, ...]:
    return tuple(OutputToken(index, token_at(index)) for index in range(num_tokens))


async def left_by_its_client(w: World, first: SequenceSpec, num_tokens: int) -> SequenceSpec:
    """Returns the sequence after its client left with `num_tokens` and another router claimed its call."""
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


async def test_a_takeover_continues_under_the_claimed_attempt():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=3),)]) as w:
        takeover = await left_by_its_client(w, sequence(max_tokens=6), 3)
        chunks = await w.generate(takeover)
        assert tokens(chunks) == scripted(6)[3:]
        assert {chunk.num_cached_tokens for chunk in chunks} == {8}
        second = w.decode.requests[-1]
        assert (second.id.attempt, second.tokens) == (2, (*PROMPT, *map(token_at, range(3))))
        assert await journal(w, takeover) == JournalPart(emitted(6), 8, FinishReason.LENGTH, "")
        assert await w.state(takeover) is RequestState.FINISHED


async def test_a_takeover_has_all_its_attempts():
    script = [ScriptedAction(Phase.DECODE, Hold(), index=3), ScriptedAction(Phase.DECODE, Hold(), index=4)]
    async with world(decode=[script, ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # second choice
        await two_refreshes(w)
        takeover = replace(await left_by_its_client(w, sequence(max_tokens=6), 3), emitted=emitted(3))
        chunks = w.dispatcher.run(w.admit(takeover))
        seen = [await anext(chunks)]
        await first.stop()
        seen += [chunk async for chunk in chunks]
        assert tokens(seen) == scripted(6)[3:]
        assert second.requests[-1].id.attempt == 3


async def test_a_takeover_is_never_refused():
    async with world(limits=ONE_AT_A_TIME) as w:
        inside = [w.admit(sequence(name, prompt=(1, 2))) for name in ("first", "second", "third")]
        with pytest.raises(Overloaded):
            w.admit(sequence("fourth"))
        admitted = w.admit(replace(sequence("takeover"), emitted=emitted(1)))
        for one in (*inside, admitted):
            w.dispatcher.release(one)


async def test_a_complete_sequence_needs_no_worker():
    async with world() as w:
        complete = replace(sequence(max_tokens=3), emitted=emitted(3), num_cached_tokens=2)
        [chunk] = await w.generate(complete)
        assert (chunk.tokens, chunk.num_cached_tokens, chunk.finish) == ((), 2, FinishReason.LENGTH)
        assert w.decode.reservations == []
        assert await journal(w, complete) == JournalPart(emitted(3), 2, FinishReason.LENGTH, "")


async def test_a_complete_text_finishes_and_aborts_its_workers():
    async with world() as w:
        admitted = w.admit(sequence())
        chunks = w.dispatcher.run(admitted)
        assert tokens([await anext(chunks), await anext(chunks)]) == scripted(2)
        admitted.complete()
        await chunks.aclose()
        for worker in (w.prefill, w.decode):
            await worker.aborted(AttemptId(sequence().id, 1), within_s=10.0)
        assert await journal(w, sequence()) == JournalPart(emitted(2), 0, FinishReason.STOP, "")
        assert await w.state(sequence()) is RequestState.FINISHED


async def test_a_sequence_complete_before_its_run_is_released():
    async with world() as w:
        admitted = w.admit(sequence())
        admitted.complete()
        w.dispatcher.release(admitted)
        assert (await journal(w, sequence())).finish is FinishReason.STOP
        assert await w.state(sequence()) is RequestState.CANCELLED


async def test_a_failure_ends_the_journal_and_a_hang_up_does_not():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=2, times=2),)]) as w:
        with pytest.raises(DeadlineExceeded):
            await w.generate(sequence("late", deadline_s=2.0))
        assert await journal(w, sequence("late")) == JournalPart(emitted(2), 0, None, "deadline_exceeded")
        chunks = w.dispatcher.run(w.admit(sequence("left")))
        assert tokens([await anext(chunks), await anext(chunks)]) == scripted(2)
        await chunks.aclose()
        assert await journal(w, sequence("left")) == JournalPart(emitted(2), 0, None, "")
