"""Routers pause, lose the store or are cut off from it, while it is emptied or rolled back: ownership settles.

Real `OwnerLease`s and `StoreWriter`s of three routers over the Lua scripts, on a clock that the test moves.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.domain.ids import AttemptId, Ballot, OwnerId, RequestId, owner_tag
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import OutputToken
from baton.store.options import StoreOptions
from baton.store.ownership import RENEWALS_PER_TTL, OwnerLease, patience_s
from baton.store.store import CallRecord, CallStatus, SequenceRecord, StateStore, StoreUnavailable
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter
from simulation.nodes.lua_store import LuaStore
from simulation.runtime.lua_redis import LuaRedis

TTL_S = 1.0
BEAT_S = TTL_S / RENEWALS_PER_TTL
SETTLE_BEATS = int(3 * (patience_s(TTL_S) + TTL_S) / BEAT_S)
CALL, SEQUENCE = RequestId("c"), RequestId("s")
NUM_TOKENS = 40


class _Link:
    """A router's access to the store, which can be cut."""

    def __init__(self, store: StateStore) -> None:
        self.away = False
        self._store = store

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        async def call(*args: Any, **fields: Any) -> Any:
            if self.away:
                raise StoreUnavailable("cut")
            return await operation(*args, **fields)

        return call


class _Router:
    """One router: answers the call while it owns it, and leaves it when a higher ballot is reported."""

    def __init__(self, name: str, store: LuaStore, world: World) -> None:
        self.owner = OwnerId(f"{name}/{name}")
        self.link = _Link(store)
        self.alive = True
        self.owned: CallRecord | None = None
        self.paused_beats = 0
        store_of = cast(StateStore, self.link)
        options = WriterOptions(retry_s=0.0005, journal_interval_s=0.0, idle_ping_s=60.0)
        self.writer = StoreWriter(store_of, options, on_superseded=self._on_superseded)
        self.lease = OwnerLease(
            store_of, self.owner, self._on_claimed, on_reset=self._on_reset, owner_ttl_s=TTL_S, clock=lambda: world.now
        )
        self._store = store
        self._num_emitted = 0

    def open(self) -> None:
        tag = owner_tag(self.owner)
        call = CallRecord(CALL, self.owner, 1, CallStatus.OPEN, "/x", b"{}", "", 0, 7, (SEQUENCE,), owner_tag=tag)
        self.owned = call
        self.writer.open_call(call)
        self.writer.create(SequenceRecord(SEQUENCE, 1, RequestState.RECEIVED, "r", "m", 3, owner_tag=tag))
        self.writer.advance(AttemptId(SEQUENCE, 1, tag), RequestEvent.ENQUEUE)

    def emit(self) -> None:
        if self.owned is not None and self._num_emitted < NUM_TOKENS:
            token = OutputToken(self._num_emitted, 1000 + self._num_emitted)
            self._num_emitted += 1
            self.writer.write_tokens(AttemptId(SEQUENCE, 1), (token,), num_cached_tokens=0)

    async def beat(self) -> None:
        if self.paused_beats:
            self.paused_beats -= 1
        elif self.alive:
            await self.lease.renew_and_claim()
            self.emit()
            await self.writer.flush(0.05 if self.link.away else 5.0)

    async def _on_claimed(self, call: CallRecord) -> None:
        journal = await self._store.read_journal(SEQUENCE, 0, 0.0)
        record = await self._store.get(SEQUENCE)
        assert record is not None
        self.owned, self._num_emitted = call, len(journal.tokens)
        if not self.writer.tracks_call(call.id):
            self.writer.adopt_call(call)
        self.writer.adopt(record)
        self.writer.write_tokens(record.attempt_id, journal.tokens, num_cached_tokens=0)

    def _on_superseded(self, id: AttemptId) -> None:
        self.owned = None

    def _on_reset(self, reset: object) -> None:
        self.writer.put_again()


class World:
    """Three routers and one server."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.server = LuaRedis(lambda: self.now)
        self.store = LuaStore(StoreOptions(owner_ttl_s=TTL_S), server=self.server)
        self.routers = [_Router(name, self.store, self) for name in ("a", "b", "c")]
        self._copy = self.server.snapshot()

    async def run(self, script: list[tuple[str, int, int]]) -> None:
        async with asyncio.timeout(60):
            for router in self.routers:
                router.writer.start()
            await self.beats(2 * RENEWALS_PER_TTL)
            self.routers[0].open()
            for act, index, num_beats in script:
                self.act(act, self.routers[index], num_beats)
                await self.beats(num_beats)
            for router in self.routers:
                router.link.away, router.paused_beats = False, 0
            await self.beats(SETTLE_BEATS)
            await self.check()
            for router in self.routers:
                await router.writer.close(0.01)

    async def beats(self, num_beats: int) -> None:
        for _ in range(num_beats):
            for router in self.routers:
                await router.beat()
            self.now += BEAT_S

    def act(self, act: str, router: _Router, num_beats: int) -> None:
        match act:
            case "pause":
                router.paused_beats = num_beats
            case "cut":
                router.link.away = not router.link.away
            case "kill" if sum(each.alive for each in self.routers) > 1:
                router.alive = False
            case "copy":
                self._copy = self.server.snapshot()
            case "roll back":
                self.server.restore(self._copy)
            case "empty":
                self.server.restore(({}, {}))

    async def check(self) -> None:
        """Exactly the owner that the store names answers the call, under the highest ballot of all that live."""
        call = await self.store.get_call(CALL)
        owners = {router.owner: router.owned for router in self.routers if router.alive and router.owned}
        if call is None:
            assert not owners, "its owner lives, and the store has lost it"
            return
        assert set(owners) == {call.owner}, (call.owner, owners)
        ballots: list[Ballot] = [owned.ballot for owned in owners.values() if owned]
        assert ballots == [call.ballot]
        record = await self.store.get(SEQUENCE)
        assert record is not None
        assert record.attempt_id.ballot == call.ballot
        journal = await self.store.read_journal(SEQUENCE, 0, 0.0)
        assert [token.token for token in journal.tokens] == [1000 + index for index in range(len(journal.tokens))]
        owner = next(router for router in self.routers if router.owner == call.owner)
        assert len(journal.tokens) == owner._num_emitted


ACT = st.tuples(
    st.sampled_from(["pause", "pause", "cut", "kill", "copy", "roll back", "empty", "wait"]),
    st.integers(0, 2),
    st.integers(0, 14),
)


@given(script=st.lists(ACT, max_size=10))
@settings(max_examples=40, deadline=None)
@example([("pause", 0, 12), ("empty", 0, 3)])
@example([("copy", 0, 0), ("pause", 0, 12), ("roll back", 0, 8)])
@example([("copy", 0, 2), ("cut", 0, 12), ("roll back", 0, 1), ("cut", 0, 8)])
@example([("empty", 0, 0), ("kill", 0, 12)])
def test_one_living_router_owns_the_call_under_the_highest_ballot(script: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        await World().run(script)

    asyncio.run(run())
