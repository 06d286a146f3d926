"""A prefill and a decode worker in this process: real servers, engine threads and transfers, a fake model.

All code between a socket and the model is the product's. The model is strict: a token outside its vocabulary ends the
engine, which every test notices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from baton.domain.fingerprint import Fingerprint, FingerprintPart
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.domain.worker import WorkerLoad, WorkerRecord, WorkerRole
from baton.engine.batch import Batch, StepOutput
from baton.engine.fake_runner import SLOT_BYTES, FakeRunner, fake_geometry, fake_token
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.mailbox import Mailbox
from baton.engine.page_scrub import PageScrub
from baton.engine.thread import EngineThread
from baton.engine.turn import EngineTurn
from baton.kv.memory import PageMemory
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Owner, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.rpc import codec
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import (
    decode_pb2,
    decode_pb2_grpc,
    handoff_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from baton.rpc.server import ServerAuth, start_server
from baton.services.decode.commands import DecodeCommand
from baton.services.decode.handoff_client import HandoffClient
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.outbox import DecodeOutbox
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.decode.server import DecodeServicer
from baton.services.decode.serving.attempts import AttemptServer, DecodeStreamEvent, ServicerConfig
from baton.services.prefill.commands import PrefillCommand
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.outbox import PrefillOutbox
from baton.services.prefill.policy import PrefillLimits
from baton.services.prefill.scheduler import PrefillScheduler
from baton.services.prefill.server import PrefillServicer, PrefillStreamEvent
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.transfer.base import PullEvent
from baton.transfer.digest import PoolHasher
from baton.transfer.puller_set import PullerSet
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.source import StreamSource
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.handoff.handoff_server import HandoffServicer
from baton.worker.handoff.links import LinkIdentity, PeerLinks
from baton.worker.handoff.session_or_call import PeerClients
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.request_validator import EngineRequestValidator
from baton.worker.streams import AttemptStreams

PAGE_SIZE, NUM_PAGES, VOCAB_SIZE, MAX_MODEL_LEN = 2, 16, 16, 28
PAGE_BYTES = PAGE_SIZE * SLOT_BYTES
PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")
PREFILL_INCARNATION, DECODE_INCARNATION = Incarnation(0xAA), Incarnation(0xBB)
MODEL = "fake"
FINGERPRINT = Fingerprint(tuple(FingerprintPart(*part) for part in fake_geometry(PAGE_SIZE).parts().items()))
LEASE_S = 0.5
TIMEOUT_S = 20.0
"""Time limit of any wait, on a busy machine."""

Answer = TypeVar("Answer")


class StrictRunner(FakeRunner):
    """Raises where a real model or sampler would raise an index error."""

    def run(self, batch: Batch) -> StepOutput:
        for row in batch.rows:
            spec = row.sample
            named = () if spec is None else (*spec.banned, *(token for token, _ in spec.sampling.logit_bias))
            for token in (*row.tokens, *named):
                if not 0 <= token < VOCAB_SIZE:
                    raise IndexError(f"{row.id}: token {token} is not in a vocabulary of {VOCAB_SIZE}")
        return super().run(batch)


class _Worker:
    """Common parts of both workers: a pool, a thread, and a record of its end."""

    def __init__(self) -> None:
        self.memory = PageMemory(NUM_PAGES, PAGE_BYTES)
        self.cache = PrefixCache(PagePool(NUM_PAGES), PoolHasher(self.memory))
        self.crash: BaseException | None = None

    def crashed(self, error: BaseException) -> None:
        self.crash = error

    def held_pages(self) -> int:
        """Pages that are neither free nor cached. Read from another thread: exact once the engine is idle."""
        counts = self.cache.pool.counts()
        return sum(count for owner, count in counts.items() if owner not in (Owner.FREE, Owner.CACHED))


class PrefillWorker(_Worker):
    """A worker wired as in `baton.services.prefill.app`."""

    def __init__(self) -> None:
        super().__init__()
        self.mailbox: Mailbox[PrefillCommand] = Mailbox(1024)
        self.streams: AttemptStreams[PrefillStreamEvent] = AttemptStreams()
        self.handoffs = HandoffLog(self.streams.is_open)
        outbox = PrefillOutbox(self.handoffs, self.streams, RecentAttempts())
        exports = ExportTable(self.cache.pool, LEASE_S)
        limits = PrefillLimits(PAGE_SIZE, 4 * PAGE_SIZE, 4, NUM_PAGES // 2)
        runner = StrictRunner(self.memory, PAGE_SIZE, VOCAB_SIZE)
        turn = EngineTurn(WorkerRole.PREFILL, self.cache, self.mailbox, on_idle=lambda: None)
        checks = PageChecks(self.cache)
        scheduler = PrefillScheduler(self.cache, exports, limits, checks)
        self.loop = PrefillLoop(turn, scheduler, exports, runner, PageScrub(checks, PAGE_BYTES), outbox.emit)
        self.thread = EngineThread(self.loop, "fuzzed-prefill", self.crashed)

    def register(self, server: grpc.aio.Server) -> None:
        source = StreamSource(PREFILL_INCARNATION, self.memory)
        terms = LinkConfig(
            PREFILL, PREFILL_INCARNATION, MODEL, FINGERPRINT, {"stream": source.metadata()}, self.memory.address,
            NUM_PAGES, PAGE_BYTES, watch_timeout_s=60.0,
        )  # fmt: skip
        handoffs = HandoffServicer(terms, self.mailbox, self.handoffs, source.read_pages)
        prefill = PrefillServicer(
            self.mailbox, self.streams, lambda: False, EngineRequestValidator(VOCAB_SIZE, MAX_MODEL_LEN)
        )
        handoff_pb2_grpc.add_HandoffServicer_to_server(handoffs, server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server)

    def is_idle(self) -> bool:
        return not (self.held_pages() or self.loop.num_requests or len(self.streams) or len(self.handoffs))


class DecodeWorker(_Worker):
    """A worker wired as in `baton.services.decode.app`."""

    def __init__(self, store: MemoryStore, channels: ChannelPool) -> None:
        super().__init__()
        self.mailbox: Mailbox[DecodeCommand] = Mailbox(256)
        self.streams: AttemptStreams[DecodeStreamEvent] = AttemptStreams()
        self.puller = StreamPuller(self.memory, self._pulled)
        identity = LinkIdentity(DECODE, DECODE_INCARNATION, MODEL, FINGERPRINT, PAGE_BYTES, grace_s=1.0)
        self.links = PeerLinks(
            identity, store, PeerClients(channels), PullerSet([self.puller]), self.mailbox, lambda: None
        )
        validator = EngineRequestValidator(VOCAB_SIZE, MAX_MODEL_LEN)
        self.handoffs = HandoffClient(self.links, self.mailbox, LEASE_S / 4, validator)
        self._outbox = DecodeOutbox(self.streams, self.handoffs, self.links, RecentAttempts())
        imports = ImportTable(self.cache, ImportLimits(PAGE_SIZE, 4, 4, pull_deadline_s=2.0))
        host = PageMemory(NUM_PAGES, PAGE_BYTES)
        scheduler = DecodeScheduler(imports, SwapSpace(NUM_PAGES, PoolHasher(host)), PAGE_SIZE)
        checks, rules = PageChecks(self.cache), ImportRules(PAGE_SIZE, digests=True)
        faults = PageFaults(self.cache, imports, scheduler, checks, PAGE_SIZE, PAGE_BYTES)
        import_policy = ImportPolicy(self.cache.pool, imports, scheduler, rules, faults)
        runner = StrictRunner(self.memory, PAGE_SIZE, VOCAB_SIZE, host)
        turn = EngineTurn(WorkerRole.DECODE, self.cache, self.mailbox, on_idle=lambda: None)
        hooks = DecodeHooks(self._outbox.emit, self.puller.submit, PageScrub(checks, PAGE_BYTES))
        self.loop = DecodeLoop(turn, imports, scheduler, import_policy, runner, hooks)
        self.thread = EngineThread(self.loop, "fuzzed-decode", self.crashed)
        config = ServicerConfig(validator, 2.0, lambda: False)
        attempts = AttemptServer(self.mailbox, self.streams, self.links, self.handoffs, config)
        self.servicer = DecodeServicer(self.mailbox, attempts, config)

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self.servicer, server)

    def is_idle(self) -> bool:
        return not (self.held_pages() or self.loop.num_requests or len(self.streams) or len(self.handoffs))

    def _pulled(self, event: PullEvent) -> None:
        self._outbox.record_pull(event)
        self.mailbox.put(event)


class WorkerPair:
    """Both workers and a channel to each, on one event loop that runs during calls of `run`."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._num_requests = 0

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs `work` to its end, within a time limit."""
        return self._runner.run(self._bounded(work))

    async def start(self) -> None:
        self.store = MemoryStore(StoreOptions(worker_ttl_s=3600.0, heartbeat_s=600.0))
        self.channels = ChannelPool()
        self.prefill, self.decode = PrefillWorker(), DecodeWorker(self.store, self.channels)
        self.workers: tuple[PrefillWorker, DecodeWorker] = (self.prefill, self.decode)
        for worker in self.workers:
            worker.thread.start()
        start = (
            start_server("127.0.0.1", 0, self.prefill.register, ServerAuth(PREFILL_INCARNATION)),
            start_server("127.0.0.1", 0, self.decode.register, ServerAuth(DECODE_INCARNATION)),
        )
        self._servers = await asyncio.gather(*start)
        to_prefill, to_decode = (f"127.0.0.1:{server.port}" for server in self._servers)
        self.to_prefill = self.channels.get(to_prefill, PREFILL_INCARNATION)
        self.to_decode = self.channels.get(to_decode, DECODE_INCARNATION)
        self._tasks = [
            asyncio.create_task(self.decode.links.run()),
            asyncio.create_task(self.decode.handoffs.renew_forever()),
        ]
        await self.store.announce(prefill_record(to_prefill, PREFILL, PREFILL_INCARNATION))
        await eventually(lambda: self.decode.links.records(), "the link")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))
        await self.decode.handoffs.close()
        await self.channels.close()
        await self.store.close()
        for worker in self.workers:
            assert worker.thread.stop(TIMEOUT_S)
        self.decode.puller.close()

    def check_alive(self) -> None:
        """Checks that no engine or task has ended and the link is up."""
        for worker in self.workers:
            assert worker.crash is None, repr(worker.crash)
        assert not any(task.done() for task in self._tasks)
        assert self.decode.links.records()

    async def settle(self) -> None:
        """Waits until nothing is held, and checks the pools."""
        self.check_alive()
        for worker in self.workers:
            await eventually(worker.is_idle, f"{type(worker).__name__} holds nothing")
            worker.cache.pool.check()
            worker.cache.check()

    def next_request(self, tokens: tuple[int, ...] = (1, 2, 3, 4, 5), max_tokens: int = 6) -> EngineRequest:
        """A new request."""
        self._num_requests += 1
        id = AttemptId(RequestId(f"good-{self._num_requests}"), 1)
        return EngineRequest(id, tokens, len(tokens), SamplingParams(temperature=0.0), StopParams(max_tokens))

    async def reserve(self, request: EngineRequest) -> decode_pb2.Reserved:
        """Reserves pages on decode, which may take a moment while others leave."""
        stub = decode_pb2_grpc.DecodeStub(self.to_decode)
        ask = decode_pb2.ReserveRequest(id=codec.encode_id(request.id), num_tokens=len(request.tokens), deadline_s=5.0)
        reply = decode_pb2.ReserveReply()

        async def reserved() -> bool:
            nonlocal reply
            reply = await stub.Reserve(ask, timeout=TIMEOUT_S)
            assert not reply.HasField("refused"), reply
            return reply.HasField("reserved")

        await eventually(reserved, "a reservation")
        return reply.reserved

    async def serve(self, request: EngineRequest) -> list[int]:
        """Returns the tokens that the pair generates for a valid request."""
        reserved = await self.reserve(request)
        generate = decode_pb2_grpc.DecodeStub(self.to_decode).Generate(self.generate(request, reserved.reservation_id))
        message = prefill_pb2.PrefillRequest(
            request=codec.encode_request(request), decode_prefix_len=reserved.decode_prefix_len, deadline_s=10.0
        )
        tokens: list[int] = []
        async for event in prefill_pb2_grpc.PrefillStub(self.to_prefill).Prefill(message, timeout=TIMEOUT_S):
            assert not event.HasField("failed"), event
            if event.HasField("sealed"):
                tokens.append(event.sealed.first_token.token)
        async for event in generate:
            assert not event.HasField("failed"), event
            if event.HasField("imported"):
                assert (event.imported.first_token.index, event.imported.first_token.token) == (0, tokens[0])
            tokens += [token.token for token in event.tokens.tokens]
        return tokens

    def generate(self, request: EngineRequest, reservation_id: str) -> decode_pb2.GenerateRequest:
        """A router's message for a reservation."""
        return decode_pb2.GenerateRequest(
            request=codec.encode_request(request),
            reservation_id=reservation_id,
            prefill_id=PREFILL,
            prefill_incarnation=PREFILL_INCARNATION,
            deadline_s=10.0,
        )

    async def check_still_serves(self) -> None:
        """A valid request gets the model's tokens; then nothing is held."""
        request = self.next_request()
        assert await self.serve(request) == expected_output(request)
        await self.settle()

    async def _bounded(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        async with asyncio.timeout(6 * TIMEOUT_S):
            return await work


def expected_output(request: EngineRequest) -> list[int]:
    """All tokens of the model alone."""
    tokens = list(request.tokens)
    for _ in range(request.stop.max_tokens):
        tokens.append(fake_token(tokens, VOCAB_SIZE))
    return tokens[len(request.tokens) :]


@contextmanager
def running_pair() -> Iterator[WorkerPair]:
    """Starts a pair and stops it in any case; after a passed test nothing may be left behind."""
    with asyncio.Runner() as runner:
        pair = WorkerPair(runner)
        pair.run(pair.start())
        try:
            yield pair
            pair.run(pair.check_still_serves())
        finally:
            pair.run(pair.stop())


async def eventually(condition: Callable[[], Any | Awaitable[Any]], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Polls `condition` until it is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)  # poll interval


def prefill_record(address: str, id: WorkerId, incarnation: Incarnation) -> WorkerRecord:
    """Registration of a prefill worker here."""
    return WorkerRecord(
        id=id,
        role=WorkerRole.PREFILL,
        incarnation=incarnation,
        address=address,
        model=MODEL,
        fingerprint=FINGERPRINT.digest,
        page_size=PAGE_SIZE,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        load=WorkerLoad(total_pages=NUM_PAGES, available_pages=NUM_PAGES),
    )
