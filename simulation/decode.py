"""A simulated decode worker: every room of the real one, wired as `services.decode.app._Worker` wires them.

Real: loop, scheduler, landings, arrivals, handoffs, links, outbox, servicer, presence. Simulated: both threads,
sockets, memory, model. `_record` and `_pulled` mirror the methods of the same names there, and `leave` the end
of `run`.
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
from baton.kv.tiers import HostTier
from baton.rpc.gen import decode_pb2_grpc
from baton.transfer.base import PullEvent
from baton.transfer.fake import TRANSPORT
from baton.transfer.puller import ThreadedPuller
from services.decode.arrivals import ArrivalRules
from services.decode.commands import AskPromise, DecodeCommand, Pulled
from services.decode.effects import EmitTokens, OutwardEffect
from services.decode.landing import LandingLimits
from services.decode.links import LINK_PATIENCE_TTLS, LinkIdentity, Links
from services.decode.loop import DecodeLoop
from services.decode.outbox import Outbox
from services.decode.server import DecodeServicer, StreamEvent
from simulation.book import BookHost, SimBook
from simulation.calls import SimChannels, SimServer
from simulation.engine import Engine, SimMailbox, SimRunner
from simulation.memory import SimMemory
from simulation.network import Host, Network
from simulation.oracle import Emissions, Violation, check_idle, check_pages
from simulation.parts import INTAKE, MODEL, SIZES, Parts, fingerprint
from simulation.process import OnCrash, Process
from simulation.reads import SimPuller, Wires
from simulation.scenario import VOCAB_SIZE, Scenario

SERVER_GRACE_S = 1.0
"""As in `services.decode.app`, which would import the model."""

PAGE_BYTES = SIZES.page_size * SLOT_BYTES


class SimDecode:
    """One life of one decode worker. Made inside its own process."""

    def __init__(
        self, process: Process, network: Network, wires: Wires, book: BookHost, parts: Parts,
        scenario: Scenario, on_crash: OnCrash, version: int,
    ) -> None:  # fmt: skip
        num_host_pages = scenario.num_host_pages
        self.process = process
        self._fingerprint = fingerprint(version)
        self._network = network
        self._lifetime = parts.lifetime(asyncio.Event())
        self._emissions = Emissions(process.name)
        self._memory = SimMemory(SIZES.num_decode_pages, PAGE_BYTES)
        self._cache = RadixCache(PagePool(SIZES.num_decode_pages))
        self._mailbox: SimMailbox[DecodeCommand] = SimMailbox(1024, self._seen)
        self._streams: Streams[StreamEvent] = Streams(on_empty=self._lifetime.idle)
        self._puller = SimPuller(process, wires.add_reader(process), self._memory, self._pulled)
        sim_book = SimBook(book, network, process, SIZES.heartbeat_s)
        self._presence = Presence(sim_book, self._record, SIZES.heartbeat_s, process.kill)
        identity = LinkIdentity(WorkerId(process.name), process.incarnation, MODEL, self._fingerprint, PAGE_BYTES)
        self._links = Links(
            identity, sim_book, SimChannels(network, process), cast(ThreadedPuller, self._puller), self._mailbox,
            self._presence.changed, LINK_PATIENCE_TTLS * SIZES.worker_ttl_s,
        )  # fmt: skip
        self._handoffs = parts.handoffs(self._links, self._mailbox, SIZES.renew_s, INTAKE)
        self._outbox = Outbox(WorkerId(process.name), TRANSPORT, self._streams, self._handoffs)
        host = SimMemory(max(1, num_host_pages), PAGE_BYTES)
        runner = SimRunner(self._memory, SIZES.page_size, VOCAB_SIZE, host, version)
        self._engine = Engine(process, runner, self._mailbox.time_out, self._check, on_crash, scenario.mean_step_s)
        self._prefills = process.name in scenario.selfish
        self._loop = self._make_loop(runner, parts, scenario.digests, num_host_pages)
        self._mailbox.on_arrival = self._engine.wake
        self._listen()
        self._engine.begin(self._loop)
        for work in (self._presence.run(), self._links.run(), self._handoffs.renew_forever()):
            process.spawn(work, "background")

    async def leave(self) -> None:
        """SIGTERM; returns when the process would exit."""
        await self._lifetime.drain(self._presence.announce, self._num_requests, SIZES.drain_s)
        await self._listener.stop(SERVER_GRACE_S)
        await self._handoffs.close()
        await self._presence.leave()
        self._links.close()

    def _num_requests(self) -> int:
        return max(self._loop.num_requests, len(self._streams))

    def check_idle(self) -> None:
        """Raises `Violation` if anything is left behind."""
        left = {
            "landings": len(self._landings),
            "draining": self._landings.num_draining,
            "reserved pages": self._landings.num_reserved_pages,
            "rows": self._scheduler.num_rows,
            "host pages": self._host.num_slots - self._host.num_free,
            "streams": len(self._streams),
            "handoffs": len(self._handoffs),
        }
        check_idle(self.process.name, self._cache.pool, left)

    def _make_loop(self, runner: SimRunner, parts: Parts, digests: bool, num_host_pages: int) -> DecodeLoop:
        limits = LandingLimits(SIZES.page_size, SIZES.max_rows, SIZES.max_window_pages, SIZES.pull_deadline_s)
        self._landings = parts.landing_book(self._cache, limits)
        self._host = HostTier(num_host_pages)
        budget = SIZES.token_budget if self._prefills else 0
        self._scheduler = parts.decode_scheduler(self._landings, self._host, SIZES.page_size, budget)
        rules = ArrivalRules(SIZES.page_size, digests)
        arrivals = parts.arrivals(self._cache.pool, self._landings, self._scheduler, rules)
        return DecodeLoop(
            self._cache, self._landings, self._scheduler, arrivals, runner, SIZES.max_rows,
            emit=self._emit, submit=self._puller.submit, on_idle=self._lifetime.idle, mailbox=self._mailbox,
        )  # fmt: skip

    def _listen(self) -> None:
        server = SimServer()
        servicer = DecodeServicer(
            self._mailbox, self._streams, self._links, self._handoffs, lambda: self._lifetime.draining,
            SIZES.promise_s, INTAKE,
            (WorkerId(self.process.name), self.process.incarnation) if self._prefills else None,
        )  # fmt: skip
        decode_pb2_grpc.add_DecodeServicer_to_server(servicer, cast(Any, server))
        self._listener = self._network.hosts[self.process.name] = Host(self.process, server.handlers)

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=WorkerId(self.process.name),
            role=WorkerRole.DECODE,
            incarnation=self.process.incarnation,
            address=self.process.name,
            model=MODEL,
            fingerprint=self._fingerprint,
            page_size=SIZES.page_size,
            max_model_len=SIZES.max_model_len,
            vocab_size=VOCAB_SIZE,
            status=self._lifetime.status,
            load=replace(self._loop.load(), step_age_s=self._engine.step_age_s()),
            links=self._links.records(),
            prefills=self._prefills,
        )

    def _pulled(self, event: PullEvent) -> None:
        self._outbox.count(event)
        self._mailbox.post(Pulled(event))

    def _seen(self, command: DecodeCommand) -> None:
        if isinstance(command, AskPromise):
            self._emissions.seen(command.id)

    def _check(self) -> None:
        check_pages(self._cache, self._puller.pages_in_flight())
        if self._landings.num_promisable < 0:
            raise Violation("I6", f"{self.process.name} has promised {-self._landings.num_promisable} pages too many")

    def _emit(self, effects: list[OutwardEffect]) -> None:
        for effect in effects:
            self._network.trace.note(self.process.name, f"{type(effect).__name__} {effect.id}", effect.id.request_id)
            if isinstance(effect, EmitTokens):
                for token in effect.tokens:
                    self._emissions.emitted(effect.id, token.index)
        self._engine.after_step(partial(self._outbox.emit, effects))
