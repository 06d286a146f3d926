"""A simulated prefill worker: every room of the real one, wired as `services.prefill.app._Worker` wires them.

Real: loop, scheduler, offers, handoff log, both servicers, presence. Simulated: thread, sockets, memory, model.
`_record` mirrors the method of the same name there, and `leave` the end of `run`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any, cast

from baton.domain.ids import WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.engine.fake_runner import SLOT_BYTES
from baton.engine.presence import Presence
from baton.engine.streams import Streams
from baton.kv.pages import PagePool
from baton.kv.radix import RadixCache
from baton.rpc.gen import handoff_pb2_grpc, prefill_pb2_grpc
from baton.transfer.digest import digest_pages
from baton.transfer.fake import TRANSPORT
from services.prefill.commands import AddPrompt, PrefillCommand, PrefillEvent
from services.prefill.handoff_log import HandoffLog
from services.prefill.handoff_server import HandoffServicer, LinkTerms
from services.prefill.loop import PrefillLoop
from services.prefill.outbox import Outbox
from services.prefill.scheduler import PrefillLimits, Seal
from services.prefill.server import PrefillServicer, StreamEvent
from simulation.book import BookHost, SimBook
from simulation.calls import SimServer
from simulation.engine import Engine, SimMailbox, SimRunner
from simulation.memory import SimMemory
from simulation.network import Host, Network
from simulation.oracle import Emissions, check_idle, check_pages
from simulation.parts import INTAKE, MODEL, SIZES, Parts, fingerprint
from simulation.process import OnCrash, Process
from simulation.reads import Wires
from simulation.scenario import VOCAB_SIZE, Scenario

WATCH_TIMEOUT_S = 60.0
SERVER_GRACE_S = 1.0
"""As in `services.prefill.app`, which would import the model."""


class SimPrefill:
    """One life of one prefill worker. Made inside its own process."""

    def __init__(
        self, process: Process, network: Network, wires: Wires, book: BookHost, parts: Parts,
        scenario: Scenario, on_crash: OnCrash, version: int,
    ) -> None:  # fmt: skip
        digests = scenario.digests
        self.process = process
        self._fingerprint = fingerprint(version)
        self._network = network
        self._lifetime = parts.lifetime(asyncio.Event())
        self._emissions = Emissions(process.name)
        self._memory = SimMemory(SIZES.num_prefill_pages, SIZES.page_size * SLOT_BYTES)
        self._cache = RadixCache(PagePool(SIZES.num_prefill_pages))
        self._offers = parts.offer_book(self._cache.pool, SIZES.lease_s, grants_leases=not digests)
        limits = PrefillLimits(SIZES.page_size, SIZES.token_budget, SIZES.max_chunking, SIZES.max_pinned_pages)
        scheduler = parts.prefill_scheduler(self._cache, self._offers, limits)
        runner = SimRunner(self._memory, SIZES.page_size, VOCAB_SIZE, version=version)
        self._mailbox: SimMailbox[PrefillCommand] = SimMailbox(1024, self._seen)
        self._streams: Streams[StreamEvent] = Streams(on_empty=self._lifetime.idle)
        self._handoffs = HandoffLog()
        self._outbox = Outbox(self._handoffs, self._streams)
        self._engine = Engine(process, runner, self._mailbox.time_out, self._check, on_crash, scenario.mean_step_s)
        self._loop = PrefillLoop(
            self._cache, scheduler, self._offers, runner, partial(digest_pages, self._memory) if digests else None,
            emit=self._emit, on_idle=self._lifetime.idle, mailbox=self._mailbox,
        )  # fmt: skip
        self._mailbox.on_arrival = self._engine.wake
        self._listen(wires.add_source(process, self._memory), None if digests else SIZES.lease_s)
        sim_book = SimBook(book, network, process, SIZES.heartbeat_s)
        self._presence = Presence(sim_book, self._record, SIZES.heartbeat_s, process.kill)
        self._engine.begin(self._loop)
        process.spawn(self._presence.run(), "background")

    async def leave(self) -> None:
        """SIGTERM; returns when the process would exit."""
        await self._lifetime.drain(self._presence.announce, self._num_requests, SIZES.drain_s)
        await self._listener.stop(SERVER_GRACE_S)
        await self._presence.leave()

    def _check(self) -> None:
        check_pages(self._cache)

    def _num_requests(self) -> int:
        return max(self._loop.num_requests, len(self._streams))

    def check_idle(self) -> None:
        """Raises `Violation` if anything is left behind."""
        left = {"offers": len(self._offers), "handoffs": len(self._handoffs), "streams": len(self._streams)}
        check_idle(self.process.name, self._cache.pool, left)

    def _listen(self, metadata: bytes, granted_lease_s: float | None) -> None:
        worker_id, memory = WorkerId(self.process.name), self._memory
        terms = LinkTerms(
            worker_id, self.process.incarnation, MODEL, self._fingerprint, {TRANSPORT: metadata}, memory.address,
            memory.num_pages, memory.page_bytes, WATCH_TIMEOUT_S, granted_lease_s,
        )  # fmt: skip
        server = SimServer()
        handoffs = HandoffServicer(terms, self._mailbox, self._handoffs, None)
        prefill = PrefillServicer(self._mailbox, self._streams, lambda: self._lifetime.draining, INTAKE)
        prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, cast(Any, server))
        handoff_pb2_grpc.add_HandoffServicer_to_server(handoffs, cast(Any, server))
        self._listener = self._network.hosts[self.process.name] = Host(self.process, server.handlers)

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=WorkerId(self.process.name),
            role=WorkerRole.PREFILL,
            incarnation=self.process.incarnation,
            address=self.process.name,
            model=MODEL,
            fingerprint=self._fingerprint,
            page_size=SIZES.page_size,
            max_model_len=SIZES.max_model_len,
            vocab_size=VOCAB_SIZE,
            status=self._lifetime.status,
            load=replace(self._loop.load(), step_age_s=self._engine.step_age_s()),
        )

    def _seen(self, command: PrefillCommand) -> None:
        if isinstance(command, AddPrompt):
            self._emissions.seen(command.request.id)

    def _emit(self, events: list[PrefillEvent]) -> None:
        for event in events:
            self._network.trace.note(self.process.name, f"{type(event).__name__} {event.id}", event.id.request_id)
            if isinstance(event, Seal):
                self._emissions.emitted(event.id, event.index)
        self._engine.after_step(partial(self._outbox.deliver, events))
