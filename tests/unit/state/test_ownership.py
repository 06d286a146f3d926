"""Leases and orphans on a clock that the test moves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.domain.ids import OwnerId, RequestId
from baton.state.base import CallRecord, CallStatus, StateUnavailable
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from baton.state.ownership import RENEWALS, Ownership

TTL_S = 1.0
BEAT_S = TTL_S / RENEWALS
OURS, THEIRS = OwnerId("router-0/a"), OwnerId("router-1/b")


def new_call(id: str, owner: OwnerId = THEIRS) -> CallRecord:
    return CallRecord(RequestId(id), owner, 1, CallStatus.OPEN, "/v1/completions", b"{}", "", 17, 5, ())


class _Book(MemoryBook):
    """A book that can be away, or lose the answer to a claim."""

    away = False
    answers_claims = True

    async def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        claimed = await super().claim_call(id, epoch, owner)
        if not self.answers_claims:
            raise StateUnavailable("the answer is lost")
        return claimed

    async def hold(self, owner: OwnerId) -> None:
        if self.away:
            raise StateUnavailable("away")
        await super().hold(owner)


@dataclass
class World:
    """One owner, and a clock in seconds."""

    now: float = 1000.0
    claimed: list[CallRecord] = field(default_factory=list)
    num_lapses: int = 0

    def __post_init__(self) -> None:
        self.book = _Book(BookOptions(owner_ttl_s=TTL_S), clock=lambda: self.now)
        self.ownership = self.owned_by(OURS)

    def owned_by(self, owner: OwnerId) -> Ownership:
        lapsed = self._lapsed if owner == OURS else lambda: None
        return Ownership(self.book, owner, self._claimed, on_lapsed=lapsed, owner_ttl_s=TTL_S, clock=lambda: self.now)

    def holds(self) -> bool:
        return self.ownership.held

    def may_claim(self) -> bool:
        return self.ownership.may_claim

    async def beats(self, num_beats: int) -> None:
        for _ in range(num_beats):
            await self.ownership.beat()
            self.now += BEAT_S

    async def _claimed(self, call: CallRecord) -> None:
        self.claimed.append(call)

    def _lapsed(self) -> None:
        self.num_lapses += 1


async def test_the_lease_is_held_from_the_first_renewal_until_renewals_stop() -> None:
    world = World()
    assert not world.holds()
    await world.beats(1)
    assert world.holds()
    await world.beats(8)
    world.book.away = True
    await world.beats(RENEWALS - 2)
    assert world.holds()
    world.now += BEAT_S
    assert not world.holds()


async def test_a_renewal_after_the_lease_s_end_is_told_once_and_no_other() -> None:
    world = World()
    await world.beats(8)
    world.book.away = True
    await world.beats(RENEWALS - 2)
    world.book.away = False
    await world.beats(8)
    assert world.num_lapses == 0
    world.book.away = True
    await world.beats(RENEWALS)
    world.book.away = False
    await world.beats(8)
    assert world.num_lapses == 1


async def test_orphans_are_claimed_after_a_whole_lease_of_good_answers_and_handed_over_once() -> None:
    world = World()
    await world.book.open_call(new_call("c"))
    await world.book.open_call(new_call("mine", OURS))
    await world.book.let_go(THEIRS)
    await world.beats(RENEWALS)
    assert world.claimed == []
    await world.beats(5)
    assert [(call.id, call.owner, call.epoch) for call in world.claimed] == [("c", OURS, 2)]


async def test_a_living_owner_keeps_its_calls() -> None:
    world = World()
    await world.book.open_call(new_call("c"))
    for _ in range(5 * RENEWALS):
        await world.book.hold(THEIRS)
        await world.beats(1)
    assert world.claimed == []
    await world.beats(RENEWALS + 1)
    assert [call.id for call in world.claimed] == ["c"]


async def test_a_book_that_was_away_makes_nobody_an_orphan() -> None:
    world = World()
    other = world.owned_by(THEIRS)
    await world.beats(2 * RENEWALS)
    await other.beat()
    await world.book.open_call(new_call("c"))
    world.book.away = True
    await world.beats(3 * RENEWALS)  # all leases are over now
    world.book.away = False
    await world.beats(RENEWALS - 1)
    await other.beat()  # the other one is back in time
    await world.beats(2)
    assert world.may_claim()
    assert world.claimed == []
    assert other.held


async def test_one_missed_renewal_starts_the_wait_again() -> None:
    world = World()
    await world.beats(RENEWALS + 1)
    assert world.may_claim()
    world.book.away = True
    await world.beats(1)
    world.book.away = False
    await world.beats(RENEWALS - 1)
    assert not world.may_claim()
    await world.beats(1)
    assert world.may_claim()


async def test_a_process_that_slept_past_its_lease_waits_too() -> None:
    world = World()
    await world.beats(RENEWALS + 1)
    world.now += TTL_S
    assert not world.holds()
    await world.ownership.beat()
    assert world.holds()
    assert not world.may_claim()


async def test_a_call_that_is_refused_does_not_keep_the_others() -> None:
    world = World()
    seen: list[RequestId] = []

    async def refuse(call: CallRecord) -> None:
        seen.append(call.id)
        raise ValueError("no")

    world.ownership = Ownership(world.book, OURS, refuse, owner_ttl_s=TTL_S, clock=lambda: world.now)
    for name in "ab":
        await world.book.open_call(new_call(name))
    await world.book.let_go(THEIRS)
    await world.beats(RENEWALS + 2)
    assert seen == ["a", "b"]


async def test_a_claim_whose_answer_is_lost_is_heard_of_later() -> None:
    """Our own lease would keep everybody from the call, and we would not know that it is ours."""
    world = World()
    await world.book.open_call(new_call("c"))
    await world.beats(RENEWALS)
    world.book.answers_claims = False
    await world.beats(1)
    assert world.claimed == []
    world.book.answers_claims = True
    await world.beats(RENEWALS + 2)
    assert [(call.id, call.owner, call.epoch) for call in world.claimed] == [("c", OURS, 2)]
    await world.beats(2 * RENEWALS)
    assert len(world.claimed) == 1


async def test_a_clean_end_lets_the_calls_go_at_once() -> None:
    world = World()
    async with asyncio.timeout(10), world.ownership:
        while not world.holds():
            await world.book.read_journal(RequestId("none"), 0, 0.001)  # lets time pass
        await world.book.open_call(new_call("mine", OURS))
        assert await world.book.orphans() == []
    assert [call.id for call in await world.book.orphans()] == ["mine"]
    assert not world.holds()
    await world.ownership.close()
