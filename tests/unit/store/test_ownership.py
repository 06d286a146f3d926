"""Owner leases and orphans on a clock that the test moves."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from dataclasses import dataclass, field

import pytest

from baton.domain.ids import Ballot, OwnerId, RequestId
from baton.store import ownership
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.ownership import RENEWALS_PER_TTL, OwnerLease, StoreReset, boot_time, patience_s
from baton.store.store import CallRecord, CallStatus, LeaseState, StoreUnavailable

TTL_S = 1.0
BEAT_S = TTL_S / RENEWALS_PER_TTL
PATIENCE_BEATS = math.ceil(patience_s(TTL_S) / BEAT_S)
OURS, THEIRS = OwnerId("router-0/a"), OwnerId("router-1/b")


def new_call(id: str, owner: OwnerId = THEIRS) -> CallRecord:
    return CallRecord(RequestId(id), owner, 1, CallStatus.OPEN, "/v1/completions", b"{}", "", 17, 5, ())


class _Store(MemoryStore):
    """A store that can be unavailable, or lose the answer to a claim."""

    away = False
    answer_delay = 0.0
    world: World
    answers_claims = True

    async def claim_call(
        self, id: RequestId, ballot: Ballot, owner: OwnerId, *, floor: int = 0, seed: CallRecord | None = None
    ) -> CallRecord | None:
        claimed = await super().claim_call(id, ballot, owner, floor=floor, seed=seed)
        if not self.answers_claims:
            raise StoreUnavailable("the answer is lost")
        return claimed

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        if self.away:
            raise StoreUnavailable("away")
        state = await super().hold_lease(owner, number)
        self.world.now += self.answer_delay
        return state


@dataclass
class World:
    """One owner, and a clock in seconds."""

    now: float = 1000.0
    claimed: list[CallRecord] = field(default_factory=list)
    resets: list[StoreReset] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = _Store(StoreOptions(owner_ttl_s=TTL_S), clock=lambda: self.now)
        self.store.world = self
        self.ownership = self.owned_by(OURS)

    def owned_by(self, owner: OwnerId) -> OwnerLease:
        on_reset = self.resets.append if owner == OURS else lambda reset: None
        return OwnerLease(
            self.store, owner, self._claimed, on_reset=on_reset, owner_ttl_s=TTL_S, clock=lambda: self.now
        )

    def replace_store(self, store: _Store) -> None:
        store.world = self
        self.store = self.ownership._store = store

    def holds(self) -> bool:
        return self.ownership.held

    def may_claim(self) -> bool:
        return self.ownership.may_claim

    async def beats(self, num_beats: int) -> None:
        for _ in range(num_beats):
            await self.ownership.renew_and_claim()
            self.now += BEAT_S

    async def _claimed(self, call: CallRecord) -> None:
        self.claimed.append(call)


async def test_the_lease_is_held_from_the_first_renewal_until_renewals_stop() -> None:
    world = World()
    assert not world.holds()
    await world.beats(1)
    assert world.holds()
    await world.beats(8)
    world.store.away = True
    await world.beats(RENEWALS_PER_TTL - 2)
    assert world.holds()
    world.now += BEAT_S
    assert not world.holds()


async def test_the_next_renewal_finds_what_the_store_lost_before() -> None:
    """A renewal that was under way may have been answered by the store before its loss: it does not count."""
    world = World()
    await world.beats(2)
    world.replace_store(_Store(StoreOptions(owner_ttl_s=TTL_S), clock=lambda: world.now))
    waiting = asyncio.create_task(world.ownership.wait_for_renewal())
    await asyncio.sleep(0)
    assert not waiting.done()
    await world.beats(1)
    assert await waiting
    assert world.resets == [StoreReset.EMPTIED]


async def test_no_renewal_is_found_while_the_store_is_away() -> None:
    world = World()
    world.ownership._ttl_s = 0.05  # real time
    world.store.away = True
    waiting = asyncio.create_task(world.ownership.wait_for_renewal())
    await asyncio.sleep(0)
    await world.beats(1)
    assert not await waiting


async def test_a_late_renewal_is_a_reset_now_and_after_the_patience() -> None:
    world = World()
    await world.beats(8)
    world.store.away = True
    await world.beats(RENEWALS_PER_TTL - 2)
    world.store.away = False
    await world.beats(PATIENCE_BEATS + 1)
    assert world.resets == []
    world.store.away = True
    await world.beats(RENEWALS_PER_TTL)
    world.store.away = False
    await world.beats(1)
    assert world.resets == [StoreReset.LAPSED]
    await world.beats(3 * PATIENCE_BEATS)
    assert world.resets == [StoreReset.LAPSED] * 2


async def test_orphans_are_claimed_once_after_one_full_lease_of_good_answers() -> None:
    world = World()
    await world.store.put_call(new_call("c"))
    await world.store.put_call(new_call("mine", OURS))
    await world.store.release_lease(THEIRS)
    await world.beats(RENEWALS_PER_TTL)
    assert world.claimed == []
    await world.beats(5)
    assert [(call.id, call.owner, call.epoch) for call in world.claimed] == [("c", OURS, 2)]


async def test_a_living_owner_keeps_its_calls() -> None:
    world = World()
    await world.store.put_call(new_call("c"))
    for _ in range(5 * RENEWALS_PER_TTL):
        await world.store.hold_lease(THEIRS, 1)
        await world.beats(1)
    assert world.claimed == []
    await world.beats(RENEWALS_PER_TTL + 1)
    assert [call.id for call in world.claimed] == ["c"]


async def test_a_store_outage_orphans_no_call() -> None:
    world = World()
    other = world.owned_by(THEIRS)
    await world.beats(2 * RENEWALS_PER_TTL)
    await other.renew_and_claim()
    await world.store.put_call(new_call("c"))
    world.store.away = True
    await world.beats(3 * RENEWALS_PER_TTL)  # all leases have expired
    world.store.away = False
    await world.beats(PATIENCE_BEATS - 1)
    await other.renew_and_claim()  # the other owner renews in time
    await world.beats(2)
    assert world.may_claim()
    assert world.claimed == []
    assert other.held


async def test_one_missed_renewal_starts_the_wait_again() -> None:
    world = World()
    await world.beats(RENEWALS_PER_TTL + 1)
    assert world.may_claim()
    world.store.away = True
    await world.beats(1)
    world.store.away = False
    await world.beats(RENEWALS_PER_TTL - 1)
    assert not world.may_claim()
    await world.beats(1)
    assert world.may_claim()


async def test_a_suspended_process_waits_for_the_patience() -> None:
    world = World()
    await world.beats(RENEWALS_PER_TTL + 1)
    world.now += TTL_S
    assert not world.holds()
    await world.beats(PATIENCE_BEATS - 1)
    assert world.holds()
    assert not world.may_claim()
    await world.beats(1)
    assert world.may_claim()


async def test_a_lease_counts_from_before_the_renewal_is_sent() -> None:
    world = World()
    world.store.answer_delay = 0.4 * TTL_S
    await world.ownership.renew_and_claim()
    world.now += 0.55 * TTL_S
    assert world.holds()
    world.now += 0.1 * TTL_S
    assert not world.holds()


async def test_an_emptied_store_is_found_and_nobody_claims_before_the_patience() -> None:
    world = World()
    await world.beats(RENEWALS_PER_TTL + 1)
    world.replace_store(_Store(StoreOptions(owner_ttl_s=TTL_S), clock=lambda: world.now))
    await world.store.put_call(new_call("c"))
    await world.store.release_lease(THEIRS)
    await world.beats(PATIENCE_BEATS)
    assert (world.resets, world.claimed) == ([StoreReset.EMPTIED], [])
    await world.beats(2)
    assert world.resets == [StoreReset.EMPTIED] * 2
    assert [call.id for call in world.claimed] == ["c"]


async def test_an_outage_does_not_shorten_the_patience() -> None:
    world = World()
    await world.beats(RENEWALS_PER_TTL + 1)
    world.replace_store(_Store(StoreOptions(owner_ttl_s=TTL_S), clock=lambda: world.now))
    await world.beats(1)
    world.store.away = True
    await world.beats(1)
    world.store.away = False
    await world.beats(PATIENCE_BEATS - 3)
    assert not world.may_claim()
    await world.beats(1)
    assert world.may_claim()


async def test_an_older_state_of_the_store_is_found() -> None:
    world = World()
    await world.beats(RENEWALS_PER_TTL + 1)
    older = copy.deepcopy(world.store._calls._leases)
    await world.beats(1)
    world.store._calls._leases = older
    await world.beats(1)
    assert world.resets == [StoreReset.ROLLED_BACK]
    await world.beats(PATIENCE_BEATS)
    assert world.resets == [StoreReset.ROLLED_BACK] * 2


async def test_a_lost_lease_that_should_hold_is_a_rollback() -> None:
    world = World()
    await world.beats(3)
    await world.store.release_lease(OURS)
    await world.beats(1)
    assert world.resets == [StoreReset.ROLLED_BACK]


async def test_another_server_is_a_reset_although_its_number_fits() -> None:
    """A replica that lacks only what came after the last renewal."""
    world = World()
    await world.beats(RENEWALS_PER_TTL + 1)
    world.store._calls._server = "another"
    await world.beats(1)
    assert world.resets == [StoreReset.RESTARTED]
    await world.beats(PATIENCE_BEATS)
    assert world.resets == [StoreReset.RESTARTED] * 2


async def test_a_renewal_whose_answer_was_lost_is_no_reset() -> None:
    world = World()
    await world.beats(2)
    await world.store.hold_lease(OURS, 3)
    world.store.away = True
    await world.beats(1)
    world.store.away = False
    await world.beats(8)
    assert world.resets == []


async def test_a_claim_after_a_rollback_gets_an_epoch_of_its_own() -> None:
    """The attempts of the claim that the store has lost may be running."""
    world = World()
    await world.store.put_call(new_call("c"))
    await world.store.release_lease(THEIRS)
    before = copy.deepcopy(world.store._calls._calls), copy.copy(world.store._calls._open)
    await world.beats(RENEWALS_PER_TTL + 2)
    world.store._calls._calls, world.store._calls._open = before
    await world.beats(2)
    assert [(call.id, call.epoch) for call in world.claimed] == [("c", 2), ("c", 3)]


async def test_only_the_last_claims_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "MAX_GRANTED", 2)
    world = World()
    for name in "abc":
        await world.store.put_call(new_call(name))
    await world.store.release_lease(THEIRS)
    await world.beats(RENEWALS_PER_TTL + 2)
    assert list(world.ownership._granted) == ["b", "c"]


async def test_a_refused_call_does_not_block_the_others() -> None:
    world = World()
    seen: list[RequestId] = []

    async def refuse(call: CallRecord) -> None:
        seen.append(call.id)
        raise ValueError("no")

    world.ownership = OwnerLease(world.store, OURS, refuse, owner_ttl_s=TTL_S, clock=lambda: world.now)
    for name in "ab":
        await world.store.put_call(new_call(name))
    await world.store.release_lease(THEIRS)
    await world.beats(RENEWALS_PER_TTL + 2)
    assert seen == ["a", "b"]


async def test_a_claim_whose_answer_is_lost_is_confirmed_later() -> None:
    """Our own lease would keep every router from the call, and we would not know that we own it."""
    world = World()
    await world.store.put_call(new_call("c"))
    await world.beats(RENEWALS_PER_TTL)
    world.store.answers_claims = False
    await world.beats(1)
    assert world.claimed == []
    world.store.answers_claims = True
    await world.beats(RENEWALS_PER_TTL + 2)
    assert [(call.id, call.owner, call.epoch) for call in world.claimed] == [("c", OURS, 2)]
    await world.beats(2 * RENEWALS_PER_TTL)
    assert len(world.claimed) == 1


async def test_a_lost_answer_is_found_while_the_router_ends() -> None:
    """It renews its lease while it drains: no other router could take the call until it has ended."""
    world = World()
    await world.store.put_call(new_call("c"))
    await world.beats(RENEWALS_PER_TTL)
    world.store.answers_claims = False
    await world.beats(1)
    world.ownership.stop_claiming()
    await world.store.put_call(new_call("later"))
    await world.beats(2 * RENEWALS_PER_TTL + 2)
    assert [call.id for call in world.claimed] == ["c"]


async def test_a_clean_stop_releases_the_lease_at_once() -> None:
    world = World()
    async with asyncio.timeout(10), world.ownership:
        while not world.holds():
            await world.store.read_journal(RequestId("none"), 0, 0.001)  # lets time pass
        await world.store.put_call(new_call("mine", OURS))
        assert await world.store.list_orphans() == []
    assert [call.id for call in await world.store.list_orphans()] == ["mine"]
    assert not world.holds()
    await world.ownership.close()


def test_leases_run_on_the_clock_that_counts_suspensions(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {time.CLOCK_BOOTTIME: 7.0}
    monkeypatch.setattr(time, "clock_gettime", readings.__getitem__)
    assert boot_time() == 7.0
