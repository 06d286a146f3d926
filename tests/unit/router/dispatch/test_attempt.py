"""One attempt over two racing streams: the order of tokens, failures and interruption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest

from baton.domain.errors import ContextOverflow, DeadlineExceeded, Superseded
from baton.domain.ids import AttemptId, Incarnation, RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason, OutputToken, SamplingParams, StopParams
from baton.domain.worker import WorkerRole
from baton.rpc.codec import encode_finish, encode_token
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.tokens.token_check import set_check
from baton.services.router.admission.slot import Slot, SlotSpec
from baton.services.router.dispatch.attempt import Attempt
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.prefill.prefill_run import PrefillRun
from baton.services.router.dispatch.reserve import PairReservation
from baton.services.router.dispatch.tracked_request import TrackedRequest
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource
from baton.services.router.generation import SequenceSpec, TokenChunk
from baton.store.memory_store import MemoryStore
from baton.store.store import SequenceRecord
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.request_timer import RequestOrigin, RequestTimer
from baton.telemetry.sequence_timer import SequenceTimer
from tests.unit.router.dispatch.test_placement import decode, prefill

ACCEPTED = prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
PROGRESS = prefill_pb2.PrefillEvent(progress=prefill_pb2.Progress(num_computed_tokens=3))
IMPORTED = decode_pb2.GenerateEvent(imported=decode_pb2.Imported())
UNAVAILABLE = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
PROMPT = (1, 2, 3)


def sealed(index: int = 0, finish: FinishReason | None = None) -> prefill_pb2.PrefillEvent:
    token = encode_token(OutputToken(index, 10 + index))
    message = prefill_pb2.Sealed(first_token=token, finish_reason=encode_finish(finish), num_cached_tokens=2)
    return prefill_pb2.PrefillEvent(sealed=message)


def tokens(*indices: int, finish: FinishReason | None = None) -> decode_pb2.GenerateEvent:
    messages = [encode_token(OutputToken(index, 10 + index)) for index in indices]
    return decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(tokens=messages, finish_reason=encode_finish(finish)))


def imported(index: int, token: int) -> decode_pb2.GenerateEvent:
    return decode_pb2.GenerateEvent(imported=decode_pb2.Imported(first_token=encode_token(OutputToken(index, token))))


def decode_failed(code: str) -> decode_pb2.GenerateEvent:
    return decode_pb2.GenerateEvent(failed=common_pb2.Failure(code=code, message="said so"))


def prefill_failed(code: str) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(failed=common_pb2.Failure(code=code, message="said so"))


def chunk(*indices: int, finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(tuple(OutputToken(index, 10 + index) for index in indices), 2, finish)


class ScriptedCall:
    """A response stream that a test fills. None ends it, an exception breaks it."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False

    def send(self, *items: Any) -> None:
        for item in items:
            self.items.put_nowait(item)

    def cancel(self) -> None:
        self.cancelled = True
        self.items.put_nowait(asyncio.CancelledError())

    async def read(self) -> Any:
        item = await self.items.get()
        self.items.task_done()
        if isinstance(item, BaseException):
            raise item
        return grpc.aio.EOF if item is None else item

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (event := await self.read()) is not grpc.aio.EOF:
            yield event


@dataclass
class ScriptedWorkers:
    """Both workers of the pair, and the attempt's reports about them."""

    prefill: ScriptedCall = field(default_factory=ScriptedCall)
    decode: ScriptedCall = field(default_factory=ScriptedCall)
    lost: dict[Incarnation, Callable[[], None]] = field(default_factory=dict)
    suspected: list[str] = field(default_factory=list)
    imported: list[AttemptId] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    ended: list[AttemptId] = field(default_factory=list)
    worker_sessions: Any = None
    suspicions: Any = field(default_factory=lambda: type("NoSuspicions", (), {"any": False}))
    known_pages: Any = field(default_factory=lambda: type("NoPages", (), {"predict_tokens": lambda *_: 0})())

    def prefill_stub(self, record: object) -> Any:
        return type("Stub", (), {"Prefill": lambda _, request, **options: self.prefill})()

    def decode_stub(self, record: object) -> Any:
        return type("Stub", (), {"Generate": lambda _, request, **options: self.decode})()

    def watch(self, incarnation: Incarnation, on_lost: Callable[[], None]) -> Callable[[], object]:
        self.lost[incarnation] = on_lost
        return lambda: self.lost.pop(incarnation, on_lost)

    def suspect(self, record: Any, reason: object, id: AttemptId, refuses: bool = False) -> None:
        self.suspected.append(record.role.value)

    def find_page_source(self, *args: object) -> None: ...
    def add_cached_pages(self, record: object, keys: object) -> None: ...

    def on_imported(self, id: AttemptId, pair: Pair) -> None:
        self.imported.append(id)

    def on_link_failure(self, id: AttemptId, pair: Pair, reason: object) -> bool:
        return True

    def on_ended(self, id: AttemptId) -> None:
        self.ended.append(id)

    def send(self, id: AttemptId, worker: object, reason: str) -> None:
        self.aborts.append(reason)


PAIR = Pair(prefill(0), decode(0))


@dataclass
class Running:
    workers: ScriptedWorkers
    attempt: Attempt
    tracked: TrackedRequest

    async def chunks(self, count: int) -> list[TokenChunk]:
        async with asyncio.timeout(5):
            return [await self.attempt.next() for _ in range(count)]


@asynccontextmanager
async def running(num_emitted: int = 0, deadline_s: float = 60.0, sessions: Any = None) -> AsyncIterator[Running]:
    emitted = tuple(OutputToken(index, 10 + index) for index in range(num_emitted))
    sequence = SequenceSpec(RequestId("r"), PROMPT, SamplingParams(), StopParams(20), "", 60.0, emitted=emitted)
    record = SequenceRecord(sequence.id, 1, RequestState.RECEIVED, "router", "m", len(PROMPT))
    store = MemoryStore()
    deadline = asyncio.get_running_loop().time() + deadline_s
    timer = SequenceTimer(RequestTimer(RequestOrigin("/v1/completions"), 0.0), 0)
    tracked = TrackedRequest(sequence, Slot(SlotSpec(num_tokens=3), 0.0), record, deadline, StoreWriter(store), timer)
    reservation = PairReservation(PAIR, "reservation", 0, ())
    tracked.on_reserved(reservation)
    workers = ScriptedWorkers()
    workers.worker_sessions = sessions
    scripted = cast(Any, workers)
    attempt = Attempt(tracked, reservation, scripted, scripted, lambda spec: PrefillRun(scripted, scripted, spec))
    try:
        async with attempt:
            yield Running(workers, attempt, tracked)
    finally:
        tracked.cancel()
        await store.close()


async def test_chunks_come_in_the_order_of_tokens():
    async with running() as r:
        r.workers.prefill.send(ACCEPTED, PROGRESS, sealed(), None)
        r.workers.decode.send(IMPORTED, tokens(1), tokens(2, 3, finish=FinishReason.STOP))
        assert await r.chunks(3) == [chunk(0), chunk(1), chunk(2, 3, finish=FinishReason.STOP)]
        assert r.workers.imported == [r.tracked.id]
    assert r.workers.aborts == []


async def test_the_first_tokens_of_prefill_and_decode_must_agree():
    for index, token in ((0, 11), (1, 10)):
        async with running() as r:
            r.workers.prefill.send(sealed())
            r.workers.decode.send(imported(index, token), tokens(1))
            assert await r.chunks(1) == [chunk(0)]
            with pytest.raises(AttemptFailure, match="sealed with another") as failed:
                await r.chunks(1)
            assert failed.value.fault_source is FaultSource.LINK
    async with running() as r:
        r.workers.prefill.send(sealed())
        r.workers.decode.send(imported(0, 10), tokens(1))
        assert await r.chunks(2) == [chunk(0), chunk(1)]


async def test_damaged_tokens_reach_no_client():
    event = tokens(1)
    set_check(event.tokens)
    event.tokens.tokens[0].token ^= 1
    async with running() as r:
        r.workers.prefill.send(sealed())
        r.workers.decode.send(IMPORTED, event)
        assert await r.chunks(1) == [chunk(0)]
        with pytest.raises(AttemptFailure, match="check number"):
            await r.chunks(1)
    seal = sealed()
    set_check(seal.sealed)
    seal.sealed.first_token.token ^= 4
    async with running() as r:
        r.workers.prefill.send(seal)
        with pytest.raises(AttemptFailure, match="check number"):
            await r.chunks(1)


@pytest.mark.parametrize("events", [[decode_pb2.GenerateEvent()], [IMPORTED, IMPORTED], [tokens(1)]])
async def test_an_event_out_of_place_fails_the_attempt(events):
    async with running() as r:
        r.workers.prefill.send(sealed())
        r.workers.decode.send(*events)
        assert await r.chunks(1) == [chunk(0)]
        with pytest.raises(AttemptFailure, match="a damaged message") as failed:
            await r.chunks(1)
        assert failed.value.fault_source is FaultSource.LINK


async def test_a_sequence_that_ends_with_the_seal_is_aborted_on_both_workers():
    async with running() as r:
        r.workers.prefill.send(sealed(finish=FinishReason.LENGTH))
        assert await r.chunks(1) == [chunk(0, finish=FinishReason.LENGTH)]
    assert r.workers.aborts == ["finished", "finished"]


async def test_decode_events_before_the_seal_are_held():
    async with running(num_emitted=5) as r:
        first = asyncio.create_task(r.attempt.next())
        r.workers.decode.send(IMPORTED, tokens(6, 7), None)
        await r.workers.decode.items.join()
        assert not first.done()
        r.workers.prefill.send(sealed(5))
        seen = [await first, await r.attempt.next()]
        assert [[token.index for token in each.tokens] for each in seen] == [[5], [6, 7]]
        with pytest.raises(AttemptFailure, match="decode ended"):
            await r.attempt.next()


async def test_a_failure_after_an_import_waits_for_the_seal():
    async with running() as r:
        first = asyncio.create_task(r.attempt.next())
        r.workers.decode.send(IMPORTED, tokens(1), decode_failed("link_broken"))
        await r.workers.decode.items.join()
        r.workers.prefill.send(sealed())
        assert [await first, await r.attempt.next()] == [chunk(0), chunk(1)]
        with pytest.raises(AttemptFailure, match="said so"):
            await r.attempt.next()


async def test_a_failure_before_an_import_does_not_wait_for_the_seal():
    async with running() as r:
        r.workers.decode.send(decode_failed("link_broken"))
        with pytest.raises(AttemptFailure, match="said so"):
            await r.chunks(1)


async def test_a_broken_stream_before_the_seal_does_not_wait_for_it():
    async with running() as r:
        r.workers.decode.send(IMPORTED, UNAVAILABLE)
        with pytest.raises(AttemptFailure, match="cannot be reached"):
            await r.chunks(1)
        assert r.workers.suspected == ["decode"]


@pytest.mark.parametrize(
    ("seal", "events"),
    [
        pytest.param(sealed(1), [], id="seal too far"),
        pytest.param(sealed(), [tokens(2)], id="gap"),
        pytest.param(sealed(), [tokens(0)], id="duplicate of the first"),
        pytest.param(sealed(), [tokens(1), tokens(1)], id="duplicate"),
        pytest.param(sealed(), [tokens(1, 3)], id="gap in a message"),
    ],
)
async def test_a_gap_or_a_duplicate_fails_the_attempt(seal, events):
    async with running() as r:
        r.workers.prefill.send(seal)
        r.workers.decode.send(IMPORTED, *events)
        with pytest.raises(AttemptFailure) as failure:
            await r.chunks(3)
        assert failure.value.error.code == "integrity_failure"
        assert failure.value.fault_source is FaultSource.LINK


async def test_a_message_with_a_gap_emits_none_of_its_tokens():
    async with running() as r:
        r.workers.prefill.send(sealed())
        r.workers.decode.send(IMPORTED, tokens(1, 3))
        with pytest.raises(AttemptFailure):
            await r.chunks(2)
        assert r.tracked.engine_request().num_emitted == 1


@pytest.mark.parametrize("role", [WorkerRole.PREFILL, WorkerRole.DECODE])
async def test_a_worker_lost_before_the_seal_fails_the_attempt(role):
    async with running() as r:
        first = asyncio.create_task(r.attempt.next())
        await asyncio.wait([first], timeout=0)
        r.workers.lost[PAIR.worker(role).incarnation]()
        with pytest.raises(AttemptFailure, match=f"{role.value} restarted"):
            await first


async def test_after_the_seal_the_end_of_prefill_does_not_matter():
    async with running() as r:
        r.workers.prefill.send(sealed(), prefill_failed("lease_ended"), sealed(), UNAVAILABLE)
        assert await r.chunks(1) == [chunk(0)]
        r.workers.lost[PAIR.prefill.incarnation]()
        r.workers.decode.send(IMPORTED, tokens(1))
        assert await r.chunks(1) == [chunk(1)]
        r.workers.lost[PAIR.decode.incarnation]()
        with pytest.raises(AttemptFailure, match="decode restarted"):
            await r.chunks(1)


@pytest.mark.parametrize(("last", "why"), [(None, "prefill ended"), (UNAVAILABLE, "cannot be reached")])
async def test_prefill_that_ends_without_a_seal_fails_the_attempt(last, why):
    async with running() as r:
        r.workers.prefill.send(ACCEPTED, last)
        with pytest.raises(AttemptFailure, match=why):
            await r.chunks(1)


@pytest.mark.parametrize("num_before", [0, 1])
async def test_the_deadline_interrupts_a_read(num_before):
    async with running(deadline_s=0.01) as r:
        r.workers.prefill.send(*[sealed()] * num_before)
        with pytest.raises(DeadlineExceeded):
            await r.chunks(num_before + 1)
    assert r.workers.prefill.cancelled
    assert r.workers.decode.cancelled


async def test_a_superseded_attempt_ends_here():
    async with running() as r:
        r.workers.decode.send(decode_failed(Superseded.code))
        with pytest.raises(Superseded, match="said so"):
            await r.chunks(1)


@pytest.mark.parametrize("error", [DeadlineExceeded, ContextOverflow])
async def test_a_refusal_that_the_router_ruled_out_fails_the_attempt(error):
    async with running() as r:
        r.workers.decode.send(decode_failed(error.code))
        with pytest.raises(AttemptFailure, match="said so") as failed:
            await r.chunks(1)
        assert type(failed.value.refusal) is error


async def test_a_cancelled_reader_cancels_the_attempt():
    async with running() as r:
        r.workers.prefill.send(sealed())
        assert await r.chunks(1) == [chunk(0)]
        second = asyncio.create_task(r.attempt.next())
        await asyncio.wait([second], timeout=0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
    assert r.workers.aborts == ["cancelled", "cancelled"]


async def test_a_cancelled_exit_still_reports_the_end():
    """A probe of a link that never ends would keep the link's breaker open."""
    seen = []

    async def leave() -> None:
        async with running() as r:
            seen.append(r)
            asyncio.get_running_loop().call_soon(task.cancel)

    task = asyncio.create_task(leave())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen[0].workers.ended == [seen[0].tracked.id]


@pytest.mark.parametrize(("stub", "is_cancelled"), [("prefill_stub", False), ("decode_stub", True)])
async def test_a_stream_that_cannot_be_opened_ends_the_attempt(monkeypatch, stub, is_cancelled):
    workers = ScriptedWorkers()
    monkeypatch.setattr(workers, stub, lambda record: 1 / 0)
    monkeypatch.setitem(globals(), "ScriptedWorkers", lambda: workers)
    with pytest.raises(ZeroDivisionError):
        await running().__aenter__()
    assert (workers.aborts, len(workers.ended), workers.prefill.cancelled) == (["cancelled"] * 2, 1, is_cancelled)
