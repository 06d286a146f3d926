"""A claim without an answer, whose readers have left, is settled once the store answers. Seed 9506401 found it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.domain.ids import OwnerId, RequestId
from baton.services.router.takeover import unanswered_claims
from baton.services.router.takeover.takeover import Takeovers
from baton.services.router.takeover.unanswered_claims import UnansweredClaims
from baton.store.store import CallRecord, CallStatus, StoreUnavailable

OURS = CallRecord(RequestId("c"), OwnerId("r/1"), 2, CallStatus.OPEN, "/", b"{}", "", 0, 0, ())


@dataclass
class ClaimWorld:
    """A store with these answers, one a question; the last one stays."""

    answers: deque[CallRecord | Exception | None]
    attended: deque[bool] = field(default_factory=lambda: deque([False]))
    granted: list[CallRecord] = field(default_factory=list)

    async def get_call(self, id: RequestId) -> CallRecord | None:
        answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_attended(self, id: RequestId) -> bool:
        return self.attended.popleft() if len(self.attended) > 1 else self.attended[0]

    async def settled(self) -> list[CallRecord]:
        """Calls that were granted, once nothing is asked any more."""
        ownership: Any = SimpleNamespace(owner=OURS.owner, holds=lambda id: False)
        store: Any = self
        claims = UnansweredClaims(store, ownership, self.is_attended, self.granted.append)
        claims.add(OURS.id)
        claims.add(OURS.id)
        async with asyncio.timeout(10.0):
            while claims._tasks:
                await asyncio.gather(*claims._tasks.values())
                await asyncio.sleep(0)
        return self.granted


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered_claims, "RETRY_S", 0.001)


async def test_a_call_that_the_store_gave_us_is_started_once():
    away = StoreUnavailable("away")
    assert await ClaimWorld(deque([away, away, OURS])).settled() == [OURS]


@pytest.mark.parametrize(
    "found",
    [
        None,
        replace(OURS, owner=OwnerId("r/0")),
        replace(OURS, status=CallStatus.ABANDONED),
        replace(OURS, status=CallStatus.ENDED),
    ],
)
async def test_a_claim_that_was_not_granted_starts_nothing(found: CallRecord | None):
    assert await ClaimWorld(deque([found])).settled() == []


async def test_what_has_readers_or_runs_is_left_to_them():
    world = ClaimWorld(deque([OURS, replace(OURS, status=CallStatus.ENDED)]), deque([True, False, True, False]))
    assert await world.settled() == []


async def test_a_store_that_stays_away_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unanswered_claims, "MAX_WAIT_S", 0.05)
    assert await ClaimWorld(deque([StoreUnavailable("away")])).settled() == []


async def test_takeovers_settle_a_claim_without_an_answer(monkeypatch: pytest.MonkeyPatch):
    async def claim_call(id: RequestId, *_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    added: list[RequestId] = []
    monkeypatch.setattr(UnansweredClaims, "add", lambda self, id: added.append(id))
    context: Any = SimpleNamespace(
        store=SimpleNamespace(claim_call=claim_call),
        call_ownership=SimpleNamespace(owner=OURS.owner, holds=lambda id: False),
        text=SimpleNamespace(digest=""),
        patience_s=2.0,
    )
    takeovers, abandoned = Takeovers(context), replace(OURS, status=CallStatus.ABANDONED)
    takeovers.add_reader(OURS.id, abandoned, None)
    with pytest.raises(StoreUnavailable):
        await takeovers.attend(OURS.id, abandoned)
    assert added == [OURS.id]
