"""A router claims no call of another tokenizer, also when a client asks for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.domain.errors import AnswerLost
from baton.domain.ids import OwnerId, RequestId
from baton.services.router.edge.http_errors import ForeignCall, error_response
from baton.services.router.streaming.sse_stream import HEADER_GRACE_S
from baton.services.router.takeover import foreign_calls
from baton.services.router.takeover.foreign_calls import ForeignCalls
from baton.services.router.takeover.takeover import FOREIGN_WAIT_S, TakeoverContext, Takeovers
from baton.store.store import CallRecord, CallStatus, StoreUnavailable

RECORD = CallRecord(RequestId("c"), OwnerId("r/0"), 1, CallStatus.ABANDONED, "/", b"{}", "", 0, 0, ())


def made(ours: str, claims: list[RequestId], later: CallStatus = CallStatus.OPEN) -> Takeovers:
    """Takeovers of a router with the tokenizer `ours`. `later`: the status of the call in the store."""

    async def claim_call(id: RequestId, *_: object, **__: object) -> None:
        claims.append(id)

    async def get_call(id: RequestId) -> CallRecord:
        return replace(RECORD, status=later)

    context: Any = SimpleNamespace(
        store=SimpleNamespace(claim_call=claim_call, get_call=get_call),
        call_ownership=SimpleNamespace(owner=OwnerId("r/1"), owner_tag=1, holds=lambda id: False),
        text=SimpleNamespace(digest=ours),
        patience_s=2.0,
    )
    return Takeovers(cast(TakeoverContext, context))


@pytest.mark.parametrize(
    ("ours", "theirs", "claimed"),
    [("ours", "theirs", False), ("ours", "ours", True), ("ours", "", True), ("", "theirs", True)],
)
def test_only_calls_of_the_own_tokenizer_are_claimed(ours: str, theirs: str, claimed: bool):
    claims: list[RequestId] = []
    takeovers, record = made(ours, claims), replace(RECORD, text_digest=theirs)

    async def follow() -> None:
        takeovers.add_reader(record.id, record, None)
        assert not await takeovers.attend(record.id, record)

    asyncio.run(follow())
    assert claims == ([record.id] if claimed else [])


async def attended(status: CallStatus, later: CallStatus) -> bool:
    """The answer to a reader that finds the call in a status, and a moment later in another one."""
    takeovers, record = made("ours", [], later), replace(RECORD, text_digest="theirs", status=status)
    takeovers.add_reader(record.id, record, None)
    return await takeovers.attend(record.id, record)


async def test_an_abandoned_call_of_another_tokenizer_ends_with_503():
    with pytest.raises(ForeignCall) as raised:
        await attended(CallStatus.ABANDONED, CallStatus.ABANDONED)
    assert FOREIGN_WAIT_S < HEADER_GRACE_S, "a status, not an event"
    response = error_response(raised.value)
    assert (response.status, response.body.code) == (503, "other_tokenizer")
    assert response.headers["retry-after"] == "1"


async def test_a_call_of_another_tokenizer_that_is_answered_is_followed():
    assert not await attended(CallStatus.OPEN, CallStatus.OPEN)
    assert not await attended(CallStatus.ABANDONED, CallStatus.OPEN), "a router of its tokenizer has claimed it"
    assert await attended(CallStatus.ENDED, CallStatus.ENDED)


ERROR = ForeignCall("try again", retry_after_s=1.0)


class World:
    """A router that must not continue the call, a store that may lose answers, and a clock."""

    def __init__(self) -> None:
        self.now, self.record, self.lose_answer = 0.0, RECORD, False
        self.num_outages = 0
        self.ended: list[tuple[RequestId, int]] = []
        ownership: Any = SimpleNamespace(owner=OwnerId("r/1"), adopt=self._adopt)
        self.calls = ForeignCalls("ours", cast(Any, self), ownership, clock=lambda: self.now)

    def _adopt(self, record: CallRecord) -> Any:
        return SimpleNamespace(end=lambda error: self.ended.append((record.id, record.epoch)))

    async def claim_call(self, id: RequestId, *_: object, **__: object) -> CallRecord:
        self.record = replace(self.record, owner=OwnerId("r/1"), epoch=self.record.epoch + 1, status=CallStatus.OPEN)
        if self.lose_answer:
            raise StoreUnavailable("no answer")
        return self.record

    async def get_call(self, id: RequestId) -> CallRecord:
        if self.num_outages:
            self.num_outages -= 1
            raise StoreUnavailable("no answer")
        return self.record

    async def told(self, at: float) -> bool:
        """True if a client that comes at a time is told that the answer is lost."""
        self.now = at
        return isinstance(await self.calls.error_by_deadline(self.record, ERROR), AnswerLost)

    async def told_by(self, end: int) -> bool:
        """The same, of a client that comes every ten seconds from now to a time."""
        return [await self.told(at) for at in range(int(self.now), end + 1, 10)][-1]


async def test_a_call_that_went_on_meanwhile_has_its_time_anew():
    world = World()
    assert not await world.told_by(50)
    world.record = replace(RECORD, epoch=2)  # a router claimed it, and was left by its client again
    assert not await world.told_by(100)
    assert await world.told_by(110)
    assert world.ended == [(RECORD.id, 3)]


async def test_a_client_that_comes_back_late_has_its_time_anew():
    world = World()
    assert not await world.told(0.0)
    assert not await world.told(600.0), "it may ask another router next"
    assert await world.told_by(660)


async def test_an_answer_that_is_complete_is_never_lost():
    world = World()
    world.record = replace(RECORD, status=CallStatus.ENDED)
    assert not await world.told_by(600)
    assert world.ended == []


@pytest.mark.parametrize("num_outages", [0, 2])
async def test_a_claim_whose_answer_was_lost_is_confirmed(monkeypatch: pytest.MonkeyPatch, num_outages: int):
    """No other router would take the call: this one lives."""
    monkeypatch.setattr(foreign_calls, "STORE_RETRY_S", 0.001)
    world = World()
    world.lose_answer, world.num_outages = True, num_outages
    assert not await world.told_by(50)
    assert await world.told_by(60)
    assert world.ended == [(RECORD.id, 2)]


async def test_a_claim_that_another_router_won_ends_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(foreign_calls, "STORE_RETRY_S", 0.001)
    world = World()

    async def lose(*_: object, **__: object) -> None:
        world.record = replace(RECORD, owner=OwnerId("r/2"), epoch=2, status=CallStatus.OPEN)
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(world, "claim_call", lose)
    assert not await world.told_by(60)
    assert world.ended == []
