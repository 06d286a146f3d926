"""A reader of a journal notices that its store has another journal of the sequence by now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.domain.errors import ModelReplaced, WorkerLost
from baton.domain.ids import AttemptId, RequestId, first_attempt
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason
from baton.services.router.generation import TokenChunk
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.takeover.journal_reader import JournalReader
from baton.services.router.takeover.takeover import Takeovers
from baton.store.memory_store import MemoryStore
from baton.store.store import JournalEntry, SequenceRecord, StateStore

ID = RequestId("c-0")
FIRST, SECOND = AttemptId(ID, 1, 7), AttemptId(ID, first_attempt(2), 9)


class _World:
    """A reader over a store that can be lost. `is_over`: what the call says."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.is_over = False
        takeovers = SimpleNamespace(add_reader=lambda *_: None, attend=self._attend)
        request = SimpleNamespace(id=RequestId("c"), sequences=(SimpleNamespace(id=ID),))
        self.reader = JournalReader(
            cast(StateStore, self), cast(ValidRequest, request), cast(Takeovers, takeovers), None
        )

    async def _attend(self, *_: object) -> bool:
        return self.is_over

    async def get_call(self, id: RequestId) -> None:
        return None

    async def read_journal(self, *args: Any) -> Any:
        return await self.store.read_journal(*args)

    async def get(self, id: RequestId) -> None:
        return None

    async def lose(self) -> None:
        """Empties the store under the reader."""
        lost, self.store = self.store, MemoryStore()
        await lost.close()

    async def write(self, id: AttemptId, first: int, tokens: Sequence[int], finish: FinishReason | None = None) -> None:
        """Writes tokens of an attempt."""
        if await self.store.get(ID) is None:
            record = SequenceRecord(ID, id.attempt, RequestState.QUEUED, "r", "m", 1, 0, owner_tag=id.owner_tag)
            await self.store.put_request(record)
        await self.store.write_journal([JournalEntry(id, first, tuple(tokens), finish=finish)])

    async def read(self, chunks: AsyncGenerator[TokenChunk, None], num_tokens: int) -> list[int]:
        """The next tokens, at least so many."""
        tokens: list[int] = []
        async for chunk in chunks:
            tokens += [token.token for token in chunk.tokens]
            if len(tokens) >= num_tokens or chunk.finish is not None:
                return tokens
        raise AssertionError("the journal ended without a finish")


@pytest.fixture
def world() -> _World:
    return _World()


async def test_a_journal_begun_anew_with_other_tokens_is_not_continued(world: _World) -> None:
    chunks = await world.reader.open(0)
    await world.write(FIRST, 0, [1, 2, 3])
    assert await world.read(chunks, 3) == [1, 2, 3]
    await world.lose()
    await world.write(SECOND, 0, [5, 6, 7, 8, 9], FinishReason.LENGTH)
    with pytest.raises(ModelReplaced):
        await world.read(chunks, 1)


async def test_equal_last_tokens_do_not_hide_another_answer(world: _World) -> None:
    chunks = await world.reader.open(0)
    await world.write(FIRST, 0, [1, 2, 3])
    assert await world.read(chunks, 3) == [1, 2, 3]
    await world.lose()
    await world.write(SECOND, 0, [5, 6, 3, 4])
    with pytest.raises(ModelReplaced):
        await world.read(chunks, 1)


async def test_a_shorter_answer_that_has_ended_is_another_one(world: _World) -> None:
    chunks = await world.reader.open(0)
    await world.write(FIRST, 0, [1, 2, 3])
    assert await world.read(chunks, 3) == [1, 2, 3]
    await world.lose()
    await world.write(SECOND, 0, [1, 2], FinishReason.STOP)
    world.is_over = True
    with pytest.raises(ModelReplaced):
        await world.read(chunks, 1)


async def test_a_journal_that_was_put_again_is_continued(world: _World) -> None:
    chunks = await world.reader.open(0)
    await world.write(FIRST, 0, [1, 2, 3])
    assert await world.read(chunks, 3) == [1, 2, 3]
    await world.lose()
    await world.write(SECOND, 0, [1, 2, 3, 4], FinishReason.LENGTH)
    assert await world.read(chunks, 1) == [4]


async def test_a_journal_that_grows_back_slowly_is_waited_for(world: _World) -> None:
    chunks = await world.reader.open(0)
    await world.write(FIRST, 0, [1, 2, 3])
    assert await world.read(chunks, 3) == [1, 2, 3]
    await world.lose()
    await world.write(SECOND, 0, [1])
    reading = asyncio.create_task(world.read(chunks, 1))
    await world.write(SECOND, 1, [2, 3])
    await world.write(SECOND, 3, [4], FinishReason.LENGTH)
    assert await reading == [4]


async def test_the_next_attempt_of_one_journal_is_continued(world: _World) -> None:
    chunks = await world.reader.open(0)
    await world.write(FIRST, 0, [1, 2])
    assert await world.read(chunks, 2) == [1, 2]
    await world.write(FIRST.next(), 2, [3], FinishReason.LENGTH)
    assert await world.read(chunks, 1) == [3]


async def test_a_lost_journal_is_a_lost_answer(world: _World) -> None:
    chunks = await world.reader.open(0)
    await world.write(FIRST, 0, [1, 2])
    assert await world.read(chunks, 2) == [1, 2]
    await world.lose()
    world.is_over = True
    with pytest.raises(WorkerLost):
        await world.read(chunks, 1)
