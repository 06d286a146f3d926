"""Writes that a reset of the store undoes: those under way, and the ends of calls that are over here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from baton.domain.ids import AttemptId, OwnerId, RequestId, owner_tag
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import OutputToken
from baton.store.store import CallRecord, CallStatus, SequenceRecord, StateStore, StoreUnavailable
from baton.store.write_behind import sync_queue
from baton.store.write_behind.call_sync import NOBODY
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import StoreWriter
from baton.store.write_chain import ChainedWrite, WriteResult, run_chain
from simulation.nodes.lua_store import LuaStore
from simulation.runtime.lua_redis import LuaRedis

OWNER = OwnerId("router-0/1")
TAG = owner_tag(OWNER)
CALL, SEQUENCES = RequestId("c"), (RequestId("s0"), RequestId("s1"))
WAIT_S = 30.0
TOKENS = [OutputToken(index, 40 + index) for index in range(3)]


class Writes:
    """The store as the writer sees it: logs its writes, and acts after one of them, before its answer."""

    def __init__(self, store: LuaStore) -> None:
        self.log: list[str] = []
        self.unanswered: list[str] = []
        self.after: tuple[str, Callable[[], None]] | None = None
        self._store = store

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        """Logs each write by the name of its operation; acts after one, before the next."""
        if "write_chains" in self.unanswered:
            self.unanswered.remove("write_chains")
            raise StoreUnavailable("not received")
        return [await run_chain(cast(StateStore, self), chain) for chain in chains]

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        async def call(*args: Any, **fields: Any) -> Any:
            self.log.append(name)
            if name in self.unanswered:
                self.unanswered.remove(name)
                raise StoreUnavailable("not received")
            answer = await operation(*args, **fields)
            if self.after is not None and self.after[0] == name:
                act, self.after = self.after[1], None
                act()
            return answer

        return call


class World:
    """A writer and its server."""

    def __init__(self) -> None:
        self.server = LuaRedis(lambda: 1000.0)
        self.store = LuaStore(server=self.server)
        self.writes = Writes(self.store)
        options = WriterOptions(retry_s=0.001, journal_interval_s=0.0, idle_ping_s=60.0)
        self.writer = StoreWriter(cast(StateStore, self.writes), options, on_degraded=self._note)
        self.recovered_after: list[str] = []

    def _note(self, degraded: bool) -> None:
        """Remembers what had been written and read when the store had caught up."""
        if not degraded:
            self.recovered_after = list(self.writes.log)

    def open(self) -> None:
        call = CallRecord(CALL, OWNER, 1, CallStatus.OPEN, "/x", b"{}", "", 0, 7, SEQUENCES, owner_tag=TAG)
        self.writer.open_call(call)
        for id in SEQUENCES:
            self.writer.create(SequenceRecord(id, 1, RequestState.RECEIVED, "router-0", "m", 3, owner_tag=TAG))
            self.writer.advance(AttemptId(id, 1, TAG), RequestEvent.ENQUEUE)

    def finish(self, attempt: int = 1) -> None:
        self.finish_sequences(attempt)
        self.writer.end_call(CALL, CallStatus.ENDED)

    def finish_sequences(self, attempt: int = 1) -> None:
        for id in SEQUENCES:
            newest = AttemptId(id, attempt, TAG)
            self.writer.write_tokens(newest, TOKENS, num_cached_tokens=0, failure_code="worker_lost")
            self.writer.advance(newest, RequestEvent.FAIL, num_emitted=3, failure_code="worker_lost")

    def empty(self) -> None:
        self.server.restore(({}, {}))

    async def flush(self) -> None:
        self.writer.start()
        assert await self.writer.flush(WAIT_S) == 0

    async def check_ended(self) -> None:
        call = await self.store.get_call(CALL)
        assert call is not None
        assert call.status is CallStatus.ENDED
        for id in SEQUENCES:
            record = await self.store.get(id)
            assert record is not None
            assert record.state is RequestState.FAILED
            journal = await self.store.read_journal(id, 0, 0.0)
            assert [token.token for token in journal.tokens] == [40, 41, 42]
            assert journal.failure_code == "worker_lost"


@pytest.fixture
async def world():
    made = World()
    yield made
    await made.writer.close()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("write", ["put_call", "put_request", "write_journal"])
async def test_a_write_under_way_during_a_reset_is_put_again(world: World, write: str, alone: bool):
    def reset() -> None:  # the store answers for what it has lost since, and the reset is noticed before the answer
        world.empty()
        world.writer.put_again()

    world.writes.after = (write, reset)
    world.writes.unanswered = ["write_chains"] * alone
    world.open()
    world.writer.write_tokens(AttemptId(SEQUENCES[0], 1, TAG), TOKENS, num_cached_tokens=0)
    await world.flush()
    assert world.writes.log.count(write) >= 2
    call = await world.store.get_call(CALL)
    assert call is not None
    assert call.status is CallStatus.OPEN
    assert [await world.store.get(id) is not None for id in SEQUENCES] == [True, True]
    assert len((await world.store.read_journal(SEQUENCES[0], 0, 0.0)).tokens) == 3


async def test_records_of_a_chain_during_a_reset_are_put_again(world: World):
    def reset() -> None:  # the first sequence is lost, the second is put afterwards
        world.empty()
        world.writer.put_again()

    world.writes.after = ("put_request", reset)
    world.open()
    await world.flush()
    assert [await world.store.get(id) is not None for id in SEQUENCES] == [True, True]


async def test_a_chain_that_was_written_in_part_goes_on_after_a_read(world: World):
    """Its first write opened another attempt; written again it would look like another owner's."""

    def lose() -> None:
        raise StoreUnavailable("answer lost")

    world.open()
    await world.flush()
    for id in SEQUENCES:
        for event in (RequestEvent.RESERVE, RequestEvent.INTERRUPT):
            world.writer.advance(AttemptId(id, 1, TAG), event)
        world.writer.advance(AttemptId(id, 2, TAG), RequestEvent.RETRY)
    world.finish(attempt=2)
    world.writes.after = ("advance", lose)
    await world.flush()
    await world.check_ended()


@pytest.mark.parametrize("num_written_before", [0, 3])
async def test_a_call_that_is_over_ends_again_after_a_rollback(world: World, num_written_before: int):
    world.open()
    for id in SEQUENCES:
        world.writer.write_tokens(AttemptId(id, 1, TAG), TOKENS[:num_written_before], num_cached_tokens=0)
    await world.flush()
    before = world.server.snapshot()
    world.finish()
    await world.flush()
    await world.check_ended()
    world.server.restore(before)
    world.writer.put_again()
    await world.flush()
    await world.check_ended()
    world.writer.put_again()  # once more after the patience
    await world.flush()
    await world.check_ended()


async def test_a_rollback_that_nobody_noticed_ends_no_call_over_a_live_sequence(world: World):
    """It comes after the ends of the sequences and before the end of their call."""
    world.open()
    await world.flush()
    before = world.server.snapshot()
    world.finish_sequences()
    await world.flush()
    world.server.restore(before)
    world.writer.end_call(CALL, CallStatus.ENDED)
    await world.flush()
    await world.check_ended()


@pytest.mark.parametrize("is_noticed", [False, True])
async def test_a_claim_that_was_rolled_back_ends_no_call_over_a_live_sequence(world: World, is_noticed: bool):
    """Its sequences had ended when it was claimed, so this owner has no copy; the next owner computes them again."""
    world.open()
    await world.flush()
    before = world.server.snapshot()
    world.finish_sequences()
    await world.flush()
    claimed = await world.store.claim_call(CALL, (1, TAG), OwnerId("router-1/2"))
    assert claimed is not None
    world.server.restore(before)
    other = StoreWriter(world.store, WriterOptions(retry_s=0.001))
    other.adopt_call(claimed)
    await world.store.hold_lease(claimed.owner, 1)
    async with other:
        if is_noticed:
            other.put_again()  # the call is this owner's again, and its sequence nobody's
            assert await other.flush(WAIT_S) == 0
        other.end_call(CALL, CallStatus.ENDED)
        assert await other.flush(WAIT_S) == 0
    await world.store.release_lease(OWNER)
    [orphan] = await world.store.list_orphans()
    assert (orphan.id, orphan.status) == (CALL, CallStatus.OPEN)
    assert orphan.owner == (NOBODY if is_noticed else OWNER)


async def test_an_over_call_ends_again_after_a_second_rollback(world: World):
    """The earlier state has nothing of the call; the later one shows it as live."""
    world.open()
    await world.flush()
    later = world.server.snapshot()
    world.finish()
    await world.flush()
    world.empty()
    world.writer.put_again()
    await world.flush()
    world.server.restore(later)
    world.writer.put_again()
    await world.flush()
    await world.check_ended()


async def test_sequences_end_again_under_the_call_of_another_owner(world: World):
    """It found them ended and ended the call; then the store was rolled back, and it has no copy of them."""
    world.open()
    await world.flush()
    before = world.server.snapshot()
    world.finish_sequences()
    await world.flush()
    world.server.restore(before)
    assert await world.store.end_call(CALL, (2, TAG), CallStatus.ENDED)
    world.writer.end_call(CALL, CallStatus.ENDED)
    world.writer.put_again()
    await world.flush()
    await world.check_ended()


async def test_a_call_that_is_over_is_not_entered_in_an_emptied_store(world: World):
    world.open()
    world.finish()
    await world.flush()
    world.empty()
    world.writer.put_again()
    await world.flush()
    assert [await world.store.get(id) for id in SEQUENCES] == [None, None]
    call = await world.store.get_call(CALL)
    assert call is None or call.status is CallStatus.ENDED


async def test_a_call_that_is_over_is_not_entered_after_an_outage_either(world: World):
    world.open()
    world.finish()
    await world.flush()
    world.empty()
    world.writes.log.clear()
    world.writes.unanswered = ["end_call", "get"]
    world.writer.put_again()
    await world.flush()
    assert world.writes.unanswered == []
    assert not {"put_call", "put_request"} & set(world.writes.log)


async def test_a_call_ends_after_its_sequences_when_the_store_loses_one(world: World):
    """The journals are written already; only the record of a sequence is missing."""
    world.open()
    await world.flush()
    world.writes.log.clear()
    world.finish()
    world.writes.unanswered = ["write_chains"]  # the journals and records are written one by one
    world.writes.after = ("write_journal", world.writer.put_again)
    await world.flush()
    await world.check_ended()
    log = world.writes.log
    assert log.count("end_call") == 1
    assert log.index("end_call") > max(index for index, name in enumerate(log) if name == "advance")


async def test_a_call_is_put_before_its_sequences_after_a_reset(world: World):
    world.open()
    await world.flush()
    for id in SEQUENCES:  # the records wait, the call does not
        world.writer.advance(AttemptId(id, 1, TAG), RequestEvent.RESERVE, fingerprint="f00d")
    world.empty()
    world.writes.log.clear()
    world.writer.put_again()
    await world.flush()
    assert world.writes.log[:3] == ["put_call", "put_request", "put_request"]


async def test_a_claim_during_an_outage_leaves_nothing_to_write(world: World):
    world.open()
    await world.flush()
    claimed = await world.store.claim_call(CALL, (1, TAG), OwnerId("router-1/2"))
    world.writes.unanswered = ["write_chains"]
    world.finish()
    await world.flush()
    assert world.writes.unanswered == []
    assert await world.store.get_call(CALL) == claimed


@pytest.mark.parametrize("alone", [False, True])
async def test_the_tombstone_of_its_own_end_does_not_refuse_a_call(world: World, alone: bool):
    world.writes.unanswered = ["write_chains"] * alone
    world.open()
    world.finish()
    tag = owner_tag(OWNER)
    await world.store.end_call(CALL, (1, tag), CallStatus.ENDED)
    await world.flush()
    await world.check_ended()


@pytest.mark.parametrize("alone", [False, True])
async def test_the_tombstone_of_its_own_end_supersedes_no_sequence(world: World, alone: bool):
    world.writes.unanswered = ["write_chains"] * alone
    world.open()
    await world.store.end_call(CALL, (1, TAG), CallStatus.ENDED)
    await world.flush()
    assert [await world.store.get(id) is not None for id in SEQUENCES] == [True, True]


@pytest.mark.parametrize("ended", [False, True])
async def test_new_sequences_do_not_wait_for_old_ends_after_a_reset(world: World, ended: bool):
    world.open()
    world.finish()
    await world.flush()
    world.writes.log.clear()
    world.writer.put_again()
    world.writes.unanswered = ["write_chains"]  # so the new ones are written one by one, too
    late = AttemptId(RequestId("late"), 1, TAG)
    world.writer.create(SequenceRecord(late.request_id, 1, RequestState.RECEIVED, "router-0", "m", 3, owner_tag=TAG))
    failure_code = "worker_lost" if ended else ""
    world.writer.write_tokens(late, TOKENS, num_cached_tokens=0, failure_code=failure_code)
    if ended:
        world.writer.advance(late, RequestEvent.FAIL, num_emitted=3, failure_code=failure_code)
    await world.flush()
    assert world.recovered_after[:3] == ["get", "put_request", "write_journal"], "the new sequence"
    assert len(world.recovered_after) < len(world.writes.log), "the old ends are read afterwards"
    assert len((await world.store.read_journal(late.request_id, 0, 0.0)).tokens) == len(TOKENS)
    await world.check_ended()


async def test_only_the_last_ended_calls_are_kept_for_a_rollback(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync_queue, "MAX_WRITTEN", 2)
    world.open()
    world.finish()
    await world.flush()
    world.writes.log.clear()
    world.writer.put_again()
    await world.flush()
    assert len(world.writes.log) <= 3
