"""Claims of clients' calls whose answers were lost: run once, by their reader or by the lease. Seed 9506401."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.domain.ids import Ballot, OwnerId, RequestId
from baton.services.router.takeover import claim_policy
from baton.services.router.takeover.call_ownership import CallOwnership
from baton.services.router.takeover.takeover import Takeovers
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.ownership import RENEWALS_PER_TTL, OwnerLease
from baton.store.store import CallRecord, CallStatus, StoreUnavailable
from baton.store.write_behind.writer import StoreWriter

TTL_S = 1.0
OURS = OwnerId("r/1")
CALL = CallRecord(RequestId("c"), OwnerId("r/0"), 1, CallStatus.OPEN, "/", b"{}", "", 0, 0, ())


class LossyStore(MemoryStore):
    """Loses requests or answers of claims, as listed; None: loses nothing."""

    def __init__(self, clock: Any) -> None:
        super().__init__(StoreOptions(owner_ttl_s=TTL_S), clock=clock)
        self.losses: deque[str | None] = deque()
        self.late: list[Any] = []
        self.num_claims = 0

    async def claim_call(
        self, id: RequestId, ballot: Ballot, owner: OwnerId, *, floor: int = 0, seed: CallRecord | None = None
    ) -> CallRecord | None:
        self.num_claims += 1
        loss = self.losses.popleft() if self.losses else None
        claim = MemoryStore.claim_call
        if loss == "request":
            self.late.append(lambda: claim(self, id, ballot, owner, floor=floor, seed=seed))
            raise StoreUnavailable("the request is on its way")
        claimed = await claim(self, id, ballot, owner, floor=floor, seed=seed)
        if loss == "answer":
            raise StoreUnavailable("the answer is lost")
        return claimed

    async def run_late(self) -> list[CallRecord | None]:
        """The requests that were lost arrive."""
        return [await claim() for claim in self.late]


class RecordedTakeovers(Takeovers):
    """Runs that never end by themselves."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.runs: list[int] = []

    async def _run(self, record: CallRecord) -> BaseException | None:
        self.runs.append(record.epoch)
        await asyncio.Event().wait()
        return None


class RouterWorld:
    """One router with its lease, and an abandoned call of another one that has a reader here."""

    def __init__(self, writer: StoreWriter, store: LossyStore, clock: Any) -> None:
        self.clock, self.store, self.writer = clock, store, writer
        call_ownership = CallOwnership(writer, OURS)
        context: Any = SimpleNamespace(
            store=store, call_ownership=call_ownership, text=SimpleNamespace(digest=""), patience_s=2.0
        )
        self.takeovers = RecordedTakeovers(context)
        self.lease = OwnerLease(
            store, OURS, self.takeovers.take_over, owner_ttl_s=TTL_S, clock=lambda: clock.now
        )  # the test renews it
        self.takeovers.follow(self.lease)

    async def begin(self) -> None:
        await self.beats(2 * RENEWALS_PER_TTL)
        await self.store.put_call(CALL)
        assert await self.store.end_call(CALL.id, CALL.ballot, CallStatus.ABANDONED)
        self.takeovers.add_reader(CALL.id, None, None)

    async def beats(self, num_beats: int) -> None:
        for _ in range(num_beats):
            await self.lease.renew_and_claim()
            self.clock.now += TTL_S / RENEWALS_PER_TTL
            await asyncio.sleep(0)

    async def attend(self) -> None:
        """The reader finds the call in the store."""
        assert not await self.takeovers.attend(CALL.id, await self.store.get_call(CALL.id))
        await asyncio.sleep(0)

    async def lose(self, loss: str) -> None:
        """The reader claims the call, and gets no answer."""
        self.store.losses.append(loss)
        with pytest.raises(StoreUnavailable):
            await self.attend()
        assert self.lease.is_claiming(CALL.id)

    async def stored(self) -> tuple[CallStatus, int]:
        leaving = [takeover.task for takeover in self.takeovers._takeovers.values() if takeover.abandoned]
        await asyncio.gather(*leaving, return_exceptions=True)
        assert await self.writer.flush(10.0) == 0
        call = await self.store.get_call(CALL.id)
        assert call is not None
        return call.status, call.epoch


@contextlib.asynccontextmanager
async def router_world() -> AsyncIterator[RouterWorld]:
    clock = SimpleNamespace(now=1000.0)
    store = LossyStore(lambda: clock.now)
    async with asyncio.timeout(30.0), StoreWriter(store) as writer:
        world = RouterWorld(writer, store, clock)
        await world.begin()
        yield world
        await world.takeovers.close()
        assert not world.takeovers._takeovers
        assert not world.takeovers._claims


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_policy, "CLAIM_BACKOFF_S", (0.0,))


@pytest.mark.parametrize("runs_late", [False, True])
async def test_a_lost_claim_is_settled_after_its_reader_has_left(runs_late: bool):
    """Without it the call stays open, and this router's lease keeps all others from it."""
    async with router_world() as world:
        await world.lose("request" if runs_late else "answer")
        world.takeovers.remove_reader(CALL.id, finished=False)
        await world.beats(1)
        await world.store.run_late()
        await world.beats(1)
        assert await world.stored() == (CallStatus.ABANDONED, 2)
        assert not world.lease.is_claiming(CALL.id)


async def test_a_reader_waits_for_the_claim_that_was_granted():
    async with router_world() as world:
        await world.lose("answer")
        await world.attend()
        assert (world.takeovers.runs, world.store.num_claims) == ([], 1)
        await world.beats(1)
        await world.attend()
        assert (world.takeovers.runs, world.store.num_claims) == ([2], 1)
        assert await world.stored() == (CallStatus.OPEN, 2)


async def test_a_reader_claims_a_call_again_once():
    async with router_world() as world:
        await world.lose("request")
        await world.attend()
        assert (world.takeovers.runs, world.lease.is_claiming(CALL.id)) == ([2], False)
        assert await world.store.run_late() == [None]
        for _ in range(3 * RENEWALS_PER_TTL):
            await world.beats(1)
            await world.attend()
        assert (world.takeovers.runs, world.store.num_claims) == ([2], 2)


async def test_a_lost_claim_that_runs_before_the_next_one_is_delivered():
    """The next one is refused, since the ballot has changed, and the reader leaves with that."""
    async with router_world() as world:
        await world.lose("request")
        found = await world.store.get_call(CALL.id)
        await world.store.run_late()
        await world.takeovers.attend(CALL.id, found)
        assert (world.takeovers.runs, world.store.num_claims) == ([], 2)
        world.takeovers.remove_reader(CALL.id, finished=False)
        await world.beats(1)
        assert await world.stored() == (CallStatus.ABANDONED, 2)


async def test_the_lease_delivers_nothing_while_a_reader_claims():
    """The answer to the reader's own claim would start the call a second time."""
    async with router_world() as world:
        await world.lose("request")
        ran, answered, claim = asyncio.Event(), asyncio.Event(), world.store.claim_call

        async def claim_slowly(*args: Any, **kwargs: Any) -> CallRecord | None:
            claimed = await claim(*args, **kwargs)
            ran.set()
            await answered.wait()
            return claimed

        world.store.claim_call = claim_slowly  # type: ignore[method-assign]
        attending = asyncio.create_task(world.attend())
        await ran.wait()
        await world.beats(RENEWALS_PER_TTL)
        assert world.takeovers.runs == []
        answered.set()
        await attending
        await world.beats(RENEWALS_PER_TTL)
        assert world.takeovers.runs == [2]


async def test_a_granted_claim_ends_what_the_lease_follows():
    """The lease has claimed the call meanwhile, without an answer: the ballot that it compared is gone."""
    async with router_world() as world:
        claim = world.store.claim_call

        async def claim_both(*args: Any, **kwargs: Any) -> CallRecord | None:
            world.lease.confirm(CALL, world.takeovers.take_over)
            return await claim(*args, **kwargs)

        world.store.claim_call = claim_both  # type: ignore[method-assign]
        await world.attend()
        assert (world.takeovers.runs, world.lease.is_claiming(CALL.id)) == ([2], False)


async def test_a_claim_that_is_found_after_the_close_starts_nothing():
    async with router_world() as world:
        await world.lose("answer")
        await world.takeovers.close()
        await world.beats(1)
        assert (world.takeovers.runs, world.takeovers._takeovers) == ([], {})
        assert await world.stored() == (CallStatus.OPEN, 2)


async def test_a_claim_of_the_lease_that_a_reader_repeats_runs_once():
    """The lease's claim is granted while the reader's is on its way. The run is over before the store knows."""
    async with router_world() as world:
        found = await world.store.get_call(CALL.id)
        assert found is not None
        claim, asked, answered = world.store.claim_call, asyncio.Event(), asyncio.Event()

        async def answer_late(*args: Any, **kwargs: Any) -> CallRecord | None:
            claimed = await claim(*args, **kwargs)
            asked.set()
            await answered.wait()
            return claimed

        world.store.claim_call = answer_late  # type: ignore[method-assign]
        claiming = asyncio.create_task(world.lease._claim([found], world.clock.now))
        await asked.wait()
        world.store.claim_call = claim  # type: ignore[method-assign]
        await world.takeovers.attend(CALL.id, found)
        answered.set()
        await claiming
        await asyncio.sleep(0)
        run = world.takeovers._takeovers[CALL.id]
        run.abandoned = run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        stored = await world.store.get_call(CALL.id)
        assert stored is not None
        assert stored.status is CallStatus.OPEN
        await world.beats(1)
        assert (world.takeovers.runs, world.takeovers._takeovers) == ([2], {})
        assert not world.lease.is_claiming(CALL.id)
        assert await world.stored() == (CallStatus.ABANDONED, 2)
