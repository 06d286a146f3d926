"""Claims whose answers were lost, on a clock that the test moves: the lease follows them to their outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.domain.ids import OwnerId, RequestId
from baton.store.store import CallRecord, CallStatus
from tests.unit.store.test_ownership import BEAT_S, OURS, PATIENCE_BEATS, THEIRS, TTL_S, World, new_call

LEASE_BEATS = round(TTL_S / BEAT_S)
FOURTH = OwnerId("router-3/d")


@dataclass
class ClaimWorld(World):
    """A patient owner, and one call of another owner that was abandoned at epoch 1."""

    call: CallRecord = field(default_factory=lambda: new_call("c"))
    confirmed: list[CallRecord] = field(default_factory=list)
    followed: list[bool] = field(default_factory=list)  # while each of them was delivered

    async def begin(self, *, epoch_of_ours: int = 0) -> None:
        """`epoch_of_ours`: of an earlier claim that made this owner the call's; 0: none did."""
        await self.beats(PATIENCE_BEATS)
        await self.store.put_call(self.call)
        while epoch_of_ours > self.call.epoch:
            await self.run_claim()
            self.call = await self.stored()
        if not epoch_of_ours:
            await self.end(CallStatus.ABANDONED)

    async def run_claim(self, owner: OwnerId = OURS) -> CallRecord | None:
        """The store runs a claim that saw the call as it is in `call`."""
        return await self.store.claim_call(self.call.id, self.call.ballot, owner)

    async def end(self, status: CallStatus) -> None:
        assert await self.store.end_call(self.call.id, (await self.stored()).ballot, status)

    async def stored(self) -> CallRecord:
        call = await self.store.get_call(self.call.id)
        assert call is not None
        return call

    def lose_answer(self, floor: int = 0) -> None:
        self.ownership.confirm(self.call, self._confirmed, floor=floor)

    def is_followed(self) -> bool:
        return self.ownership.is_claiming(self.call.id)

    def epochs(self) -> list[int]:
        assert self.claimed == []
        assert all(self.followed)
        return [call.epoch for call in self.confirmed]

    async def _confirmed(self, call: CallRecord) -> None:
        self.confirmed.append(call)
        self.followed.append(self.is_followed())


async def test_a_granted_claim_is_delivered_once() -> None:
    world = ClaimWorld()
    await world.begin()
    await world.run_claim()
    world.lose_answer()
    assert world.is_followed()
    await world.beats(1)
    assert (world.epochs(), world.is_followed()) == ([2], False)
    await world.beats(3 * LEASE_BEATS)
    assert world.epochs() == [2]


async def test_a_claim_that_runs_late_is_delivered() -> None:
    world = ClaimWorld()
    await world.begin()
    world.lose_answer()
    await world.beats(LEASE_BEATS)  # the first of them finds the call unchanged
    assert world.is_followed()
    await world.run_claim()
    await world.beats(1)
    assert (world.epochs(), world.is_followed()) == ([2], False)


async def test_a_call_that_stays_unchanged_is_given_up_after_one_lease() -> None:
    world = ClaimWorld()
    await world.begin()
    world.lose_answer()
    await world.beats(LEASE_BEATS + 1)
    assert (world.epochs(), world.is_followed()) == ([], False)


async def test_a_call_that_the_store_lacks_may_be_entered_late() -> None:
    world = ClaimWorld()
    await world.beats(PATIENCE_BEATS)
    world.lose_answer()
    await world.beats(LEASE_BEATS)
    assert world.is_followed()
    await world.store.claim_call(world.call.id, (0, 0), OURS, seed=world.call)
    await world.beats(1)
    assert (world.epochs(), world.is_followed()) == ([2], False)


@pytest.mark.parametrize("status", [CallStatus.OPEN, CallStatus.ABANDONED, CallStatus.ENDED])
async def test_a_claim_of_another_owner_ends_it_at_once(status: CallStatus) -> None:
    world = ClaimWorld()
    await world.begin()
    await world.store.hold_lease(FOURTH, 1)
    await world.run_claim(FOURTH)
    if status is not CallStatus.OPEN:
        await world.end(status)
    world.lose_answer()
    await world.beats(1)
    assert (world.epochs(), world.is_followed()) == ([], False)


@pytest.mark.parametrize("status", [CallStatus.ABANDONED, CallStatus.ENDED])
async def test_a_granted_call_that_has_an_end_is_not_delivered(status: CallStatus) -> None:
    world = ClaimWorld()
    await world.begin()
    await world.run_claim()
    await world.end(status)
    world.lose_answer()
    await world.beats(1)
    assert (world.epochs(), world.is_followed()) == ([], False)


async def test_a_call_that_ended_is_not_followed() -> None:
    world = ClaimWorld()
    await world.begin()
    await world.end(CallStatus.ENDED)
    world.lose_answer()
    await world.beats(1)
    assert (world.epochs(), world.is_followed()) == ([], False)


async def test_the_record_of_an_earlier_claim_is_no_grant() -> None:
    """It names this owner, and its run may be over: only a higher ballot is that of the lost claim."""
    world = ClaimWorld()
    await world.begin(epoch_of_ours=2)
    world.lose_answer()
    await world.beats(LEASE_BEATS)
    assert world.epochs() == []
    await world.run_claim()
    await world.beats(1)
    assert world.epochs() == [3]


async def test_a_record_at_the_floor_of_a_claim_is_no_grant() -> None:
    """A store that was rolled back gets an earlier claim again; a claim is granted above all epochs seen."""
    world = ClaimWorld()
    await world.begin()
    world.lose_answer(floor=2)
    await world.run_claim()
    await world.beats(1)
    assert (world.epochs(), world.is_followed()) == ([], False)


async def test_a_lost_claim_outlasts_an_outage_of_the_store() -> None:
    """The lease after an unchanged call counts good answers: the outage delays the claim, too."""
    world = ClaimWorld()
    await world.begin()
    world.lose_answer()
    await world.beats(1)
    world.store.away = True
    await world.beats(3 * LEASE_BEATS)
    assert world.is_followed()
    world.store.away = False
    await world.beats(PATIENCE_BEATS + 1)  # the last one reads the call
    assert world.is_followed()
    await world.run_claim()
    await world.beats(1)
    assert world.epochs() == [2]


async def test_a_claim_that_is_forgotten_during_its_read_is_not_delivered() -> None:
    world = ClaimWorld()
    await world.begin()
    await world.run_claim()
    world.lose_answer()
    read = world.store.get_call

    async def forget_and_read(id: object) -> CallRecord | None:
        world.ownership.forget(world.call.id)
        return await read(world.call.id)

    world.store.get_call = forget_and_read  # type: ignore[method-assign]
    await world.beats(2)
    assert (world.epochs(), world.is_followed()) == ([], False)


async def test_a_refused_claim_of_an_orphan_is_not_followed() -> None:
    world = ClaimWorld()
    await world.beats(PATIENCE_BEATS)
    await world.store.put_call(world.call)
    await world.store.release_lease(THEIRS)
    listed = await world.store.list_orphans()
    await world.run_claim(FOURTH)
    await world.ownership._claim(listed, world.now)
    assert (world.claimed, world.is_followed()) == ([], False)


async def test_a_closed_lease_follows_nothing() -> None:
    world = ClaimWorld()
    await world.begin()
    world.ownership.start()
    await asyncio.sleep(0)
    world.lose_answer()
    assert world.is_followed()
    await world.ownership.close()
    assert not world.is_followed()
    world.lose_answer()
    assert not world.is_followed()
    assert world.ownership._task is not None
    assert world.ownership._task.done()


async def test_many_lost_claims_do_not_end_the_lease() -> None:
    """A slow store answers some of their reads between two renewals; the others have their turn later."""
    world = ClaimWorld()
    await world.beats(PATIENCE_BEATS)
    calls, read = [new_call(f"c-{number}") for number in range(20)], world.store.get_call

    async def read_slowly(id: RequestId) -> CallRecord | None:
        world.now += TTL_S / 10
        return await read(id)

    world.store.get_call = read_slowly  # type: ignore[method-assign]
    for call in calls:
        await world.store.put_call(call)
        await world.store.claim_call(call.id, call.ballot, OURS)
        world.ownership.confirm(call, world._confirmed)
    resets = list(world.resets)
    await world.beats(len(calls))
    assert world.resets == resets
    assert sorted(call.id for call in world.confirmed) == sorted(call.id for call in calls)


async def test_undecided_claims_do_not_keep_others_from_their_turn() -> None:
    world = ClaimWorld()
    await world.begin()
    await world.run_claim()
    read = world.store.get_call

    async def read_slowly(id: RequestId) -> CallRecord | None:
        world.now += TTL_S / 5
        return await read(id)

    world.store.get_call = read_slowly  # type: ignore[method-assign]
    for number in range(4):
        world.ownership.confirm(new_call(f"missing-{number}"), world._confirmed)
    world.lose_answer()
    await world.beats(3)  # two reads between two renewals
    assert world.epochs() == [2]


async def test_many_orphans_do_not_end_the_lease() -> None:
    world = ClaimWorld()
    await world.beats(PATIENCE_BEATS)
    calls, claim = [new_call(f"c-{number}") for number in range(20)], world.store.claim_call

    async def claim_slowly(*args: Any, **kwargs: Any) -> CallRecord | None:
        world.now += TTL_S / 10
        return await claim(*args, **kwargs)

    world.store.claim_call = claim_slowly  # type: ignore[method-assign]
    for call in calls:
        await world.store.put_call(call)
    await world.store.release_lease(THEIRS)
    resets = list(world.resets)
    await world.beats(len(calls))
    assert world.resets == resets
    assert sorted(call.id for call in world.claimed) == sorted(call.id for call in calls)
