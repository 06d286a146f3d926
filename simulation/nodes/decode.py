"""A simulated decode worker: every module of the real one, wired as `baton.services.decode.app._Worker` wires them.

Real: loop, scheduler, imports, import_policy, handoffs, links, outbox, servicer, registration. Simulated: both threads,
sockets, memory, model. `_record` and `_pulled` mirror the methods of the same names there, and `leave` the end
of `run`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, cast

from baton.domain.ids import AttemptId, PageId, WorkerId
from baton.domain.request import EngineRequest
from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import (
    ALL_IN_SESSIONS,
    CAPABILITIES,
    IMAGE,
    SESSION_LINKS,
    TEXT,
    WorkerLoad,
    WorkerRecord,
    WorkerRole,
)
from baton.engine.chunking import ChunkBudget
from baton.engine.drafts.policy import DraftPolicy
from baton.engine.handoff.cached_exports import ExportLimits
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.grammar.tokenizer import CAPABILITY
from baton.kv.growth import GrowthReserve
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Owner
from baton.kv.swap_space import SwapSpace
from baton.rpc.gen import decode_pb2_grpc, handoff_pb2_grpc
from baton.services.decode.commands import DecodeCommand, Reserve
from baton.services.decode.effects import EmitTokens, OutwardEffect
from baton.services.decode.import_policy import ImportRules
from baton.services.decode.kv_import import ImportLimits
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.outbox import DecodeOutbox
from baton.services.decode.page_exports import PageExports
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.rows.order import RowOrder
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.rows.send_back import SendBackReason
from baton.services.decode.server import DecodeServicer
from baton.services.decode.serving.attempts import AttemptServer, DecodeStreamEvent, ServicerConfig
from baton.services.decode.serving.sessions import serve_attempts
from baton.transfer.base import PullEvent, region_of, window_region_of
from baton.transfer.digest import PoolHasher
from baton.transfer.fake import TRANSPORT
from baton.transfer.puller import ThreadedPuller
from baton.transfer.puller_set import PullerSet
from baton.worker.budget_control import BudgetChange, BudgetControl, BudgetRules
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.handoff.handoff_server import HandoffServicer
from baton.worker.handoff.links import LINK_GRACE_TTLS, LinkIdentity, PeerLinks
from baton.worker.handoff.session_or_call import PeerClients
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.registration import Registration
from baton.worker.sessions.listener import listen_for_sessions
from baton.worker.sessions.session_handlers import SessionHandlers
from baton.worker.streams import AttemptStreams
from simulation.announced_fits import AnnouncedFits
from simulation.checks.invariants import EmissionCheck, Violation, check_idle, check_pages
from simulation.nodes.drafter import MAX_DRAFTS, SimDrafter
from simulation.nodes.engine import SimEngine, SimMailbox, SimRunner
from simulation.nodes.environment import SimEnvironment
from simulation.nodes.link_sessions import sim_link_sessions
from simulation.nodes.state_store import SimStore
from simulation.policies import CONFIG, IMAGE_INTAKE, INTAKE, MODEL, PolicyClasses, model_fingerprint
from simulation.runtime.grpc_calls import SimChannels, SimServer
from simulation.runtime.network import Endpoint
from simulation.runtime.page_memory import SimMemory, leading_parts, sim_cache
from simulation.runtime.page_reads import SimPuller
from simulation.runtime.page_rot import flip_bits, settled_pages
from simulation.runtime.process import SimProcess
from simulation.runtime.session_ports import session_address
from simulation.runtime.session_wire import SimWire
from simulation.runtime.step_time import ScriptedStepTime, attentive
from simulation.scenario import VOCAB_SIZE, SimFaultKind

SERVER_GRACE_S, WATCH_TIMEOUT_S = 1.0, 5.0
"""Copied from `baton.services.decode.app`, which would import the model."""

ITL_OBJECTIVE_S = 20.0
"""In the units of `attentive`."""


class SimDecode:
    """One life of one decode worker. Created inside its own process."""

    def __init__(self, process: SimProcess, environment: SimEnvironment, version: int) -> None:
        network, policies, scenario = environment.network, environment.policies, environment.scenario
        num_host_pages = scenario.num_host_pages
        self.process = process
        self._fits = None
        if scenario.fits:
            self._fits = AnnouncedFits(Random(f"fits {scenario.seed} {process.name}"), scenario.mean_step_s)
        self._fingerprint = model_fingerprint(version)
        self._session_address = session_address(process.name, scenario.session_ports)
        self._network = network
        self._lifecycle = policies.lifecycle(asyncio.Event())
        self._emission_check = EmissionCheck(process.name)
        self._cache, self._memory = sim_cache(
            CONFIG.num_decode_pages, CONFIG.page_size, scenario.num_decode_window_slots, scenario.eviction,
            digests=scenario.digests,
        )  # fmt: skip
        self._mailbox: SimMailbox[DecodeCommand] = SimMailbox(1024, self._on_command)
        self._streams: AttemptStreams[DecodeStreamEvent] = AttemptStreams(on_empty=self._lifecycle.on_idle)
        self._puller = SimPuller(process, environment.page_network.add_reader(process), self._memory, self._pulled)
        sim_store = SimStore(environment.store_server, network, process, CONFIG.heartbeat_s)
        self._registration = Registration(sim_store, self._record, CONFIG.heartbeat_s, lambda _: process.kill())
        identity = LinkIdentity(
            WorkerId(process.name), process.incarnation, MODEL, self._fingerprint, self._memory.page_bytes,
            LINK_GRACE_TTLS * CONFIG.worker_ttl_s, num_leading_parts=leading_parts(self._memory),
            has_window_slots=self._cache.pool.windows is not None,
        )  # fmt: skip
        pullers = PullerSet([cast(ThreadedPuller, self._puller)])
        self._link_sessions = sim_link_sessions(environment, process)
        peers = PeerClients(SimChannels(network, process), self._link_sessions)
        self._links = PeerLinks(
            identity, sim_store, peers, pullers, self._mailbox, self._registration.announce_soon
        )  # fmt: skip
        num_parts = len(self._memory.part_ends)
        self._handoffs = policies.handoffs(self._links, self._mailbox, CONFIG.renew_s, INTAKE, num_parts)
        self._outbox = DecodeOutbox(self._streams, self._handoffs, self._links, RecentAttempts())
        self._host_memory = SimMemory(max(1, num_host_pages), self._memory.page_bytes, self._memory.part_ends)
        runner = SimRunner(self._memory, CONFIG.page_size, VOCAB_SIZE, self._host_memory, version)
        runner.window, runner.windows = self._cache.window, self._cache.pool.windows
        self._engine = SimEngine(
            process, runner, self._mailbox.end_wait, self._check, environment.on_crash, scenario.mean_step_s
        )
        self._token_budget = CONFIG.token_budget if process.name in scenario.local_prefill_workers else 0
        self._num_preemptions = self._num_given = 0
        self._growth_mode, self._plan = scenario.growth, scenario.scheduling
        self._gives_pages = scenario.gives_pages
        self._has_images = scenario.images
        self._rots = any(fault.kind is SimFaultKind.ROT for fault in scenario.faults)
        self._drafter = None
        if scenario.drafts:
            self._drafter = SimDrafter(process.rng, self._request_of, version, scenario.draft_trees)
        self._loop = self._make_loop(runner, policies, scenario.digests, num_host_pages)
        rules = BudgetRules(WorkerRole.DECODE, CONFIG.page_size)
        self._configured = self._loop.budgets()
        self._budgets = BudgetControl(rules, self._mailbox, self._loop.budgets, self._registration.announce)
        self._mailbox.on_arrival = self._engine.wake
        self._masks = runner.masks
        self._listen(environment.page_network.add_source(process, self._memory))
        self._engine.begin(self._loop)
        for work in (self._registration.run(), self._links.run(), self._handoffs.renew_forever()):
            process.spawn(work, "background")

    async def leave(self) -> None:
        """SIGTERM; returns when the process would exit."""
        await self._lifecycle.drain(self._registration.announce, self._num_requests, CONFIG.drain_s)
        await self._sessions.leave("the worker leaves")
        await self._listener.stop(SERVER_GRACE_S)
        await self._handoffs.close()
        await self._registration.withdraw()
        self._links.close()
        if self._link_sessions is not None:
            await self._link_sessions.close()

    def _num_requests(self) -> int:
        return max(self._loop.num_requests, len(self._streams))

    async def change_budgets(self, change: BudgetChange | None) -> None:
        """What `baton role` does; None: to the budgets that the process has started with."""
        configured = self._configured
        if change is None:
            change = BudgetChange(configured.prefill_tokens, configured.rows, configured.reservations)
        await self._budgets.change(change)

    def check_idle(self) -> None:
        """Raises `Violation` if anything is left behind."""
        left = {
            "imports": len(self._imports),
            "draining": self._imports.num_draining,
            "reserved pages": self._imports.num_reserved_pages,
            "rows": self._scheduler.num_rows,
            "host pages": self._host.num_slots - self._host.num_free,
            "streams": len(self._streams),
            "handoffs": len(self._handoffs),
            "exports": len(self._exports),
            "drafted rows": 0 if self._drafter is None else self._drafter.num_rows,
        }
        check_idle(self.process.name, self._cache.pool, left)
        cached = [PageId(page) for page in settled_pages(self._cache.pool, (Owner.CACHED,))]
        wrong = self._checks.mismatches(cached)
        if (wrong or self._scheduler.num_send_backs[SendBackReason.DAMAGED_COPY]) and not self._rots:
            raise Violation(
                "I2", f"{self.process.name}: pages {wrong} have other digests than bytes, and nothing rotted"
            )

    def rot(self, rng: Random) -> list[int]:
        """Flips bits of settled pages that nothing holds and of pages in host memory; returns the former."""
        host = [slot for slot in range(self._host.num_slots) if self._host.digests([slot])]
        flip_bits(rng, self._host_memory, host)
        return flip_bits(rng, self._memory, settled_pages(self._cache.pool, (Owner.CACHED, Owner.PINNED)))

    def _make_loop(self, runner: SimRunner, policies: PolicyClasses, digests: bool, num_host_pages: int) -> DecodeLoop:
        limits = ImportLimits(
            CONFIG.page_size, CONFIG.max_rows, CONFIG.max_window_pages, CONFIG.pull_deadline_s,
            max_reservations=self._plan.max_reservations, window=self._cache.window,
            max_row_tokens=2 if self._drafter is None else 1 + MAX_DRAFTS, max_chunk_tokens=CONFIG.token_budget,
        )  # fmt: skip
        self._imports = policies.import_table(self._cache, limits)
        memory = self._memory
        hasher = PoolHasher(self._host_memory) if digests else None
        self._host = SwapSpace(num_host_pages, hasher, self._cache.pool.num_window_parts)
        growth = GrowthReserve(self._growth_mode, CONFIG.page_size, self._plan.growth_clip_tokens)
        step_time = ScriptedStepTime(attentive)
        chunks = ChunkBudget(self._token_budget, CONFIG.page_size, self._plan.chunking, step_time, ITL_OBJECTIVE_S)
        drafts = None
        if self._drafter is not None:
            drafts = DraftPolicy(self._drafter, MAX_DRAFTS, CONFIG.page_size, self._cache.pool)
        rows = RowRules(growth, drafts, RowOrder(self._plan.by_priority))
        self._scheduler = policies.decode_scheduler(self._imports, self._host, CONFIG.page_size, chunks, rows)
        rules = ImportRules(CONFIG.page_size, digests)
        self._checks = checks = PageChecks(self._cache)
        faults = PageFaults(self._cache, self._imports, self._scheduler, checks, CONFIG.page_size, memory.page_bytes)
        import_policy = policies.import_policy(self._cache.pool, self._imports, self._scheduler, rules, faults, growth)
        turn = EngineTurn(WorkerRole.DECODE, self._cache, self._mailbox, self._lifecycle.on_idle)
        self._exports = ExportTable(self._cache.pool, CONFIG.lease_s)
        given = ExportLimits(CONFIG.max_given_pages, import_policy.num_free_pages)
        cached = policies.cached_exports(self._cache, self._exports, checks, given)
        exports = PageExports(self._exports, cached, import_policy) if self._gives_pages else None
        hooks = DecodeHooks(self._emit, self._puller.submit, PageScrub(checks, memory.page_bytes), None, exports)
        return DecodeLoop(turn, self._imports, self._scheduler, import_policy, runner, hooks)

    def _request_of(self, id: AttemptId) -> EngineRequest:
        return next(row.request for queue in self._scheduler._queues for row in queue if row.request.id == id)

    def _listen(self, metadata: bytes) -> None:
        server = SimServer()
        identity = (WorkerId(self.process.name), self.process.incarnation)
        config = ServicerConfig(
            IMAGE_INTAKE if self._has_images else INTAKE, CONFIG.reserve_timeout_s, lambda: self._lifecycle.draining,
            identity, self._masks,
        )  # fmt: skip
        attempts = AttemptServer(self._mailbox, self._streams, self._links, self._handoffs, config)
        servicer = DecodeServicer(self._mailbox, attempts, config)
        decode_pb2_grpc.add_DecodeServicer_to_server(servicer, cast(Any, server))
        exporter = None
        if self._gives_pages:
            memory = self._memory
            terms = LinkConfig(
                WorkerId(self.process.name), self.process.incarnation, MODEL, self._fingerprint, {TRANSPORT: metadata},
                memory.address, memory.num_pages, region_of(memory).page_bytes, WATCH_TIMEOUT_S, None,
                len(memory.part_ends), True, window_region_of(memory),
            )  # fmt: skip
            handoffs = HandoffServicer(terms, self._mailbox, HandoffLog(), None)
            handoff_pb2_grpc.add_HandoffServicer_to_server(handoffs, cast(Any, server))
            exporter = handoffs.handlers
        self._listener = self._network.hosts[self.process.name] = Endpoint(self.process, server.handlers)
        handlers = SessionHandlers(servicer.abort, serve_attempts(attempts), servicer.reserve)
        self._sessions = listen_for_sessions(
            handlers, OPEN_CLUSTER, self.process.incarnation, CONFIG.max_model_len, exporter
        )
        SimWire.listen(self._listener, self._sessions.serve)

    def _load(self) -> WorkerLoad:
        load = replace(self._loop.load(), step_age_s=self._engine.step_age_s())
        return load if self._fits is None else replace(load, step_time=self._fits.next())

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=WorkerId(self.process.name),
            role=WorkerRole.DECODE,
            incarnation=self.process.incarnation,
            address=self.process.name,
            model=MODEL,
            fingerprint=self._fingerprint.digest,
            page_size=CONFIG.page_size,
            max_model_len=CONFIG.max_model_len,
            vocab_size=VOCAB_SIZE,
            status=self._lifecycle.status,
            load=self._load(),
            page_bytes=self._memory.page_bytes if self._fits is not None else 0,
            links=self._links.records(),
            grammars=CAPABILITY,
            capabilities=(*CAPABILITIES, *ALL_IN_SESSIONS, *((SESSION_LINKS,) if self._gives_pages else ())),
            budgets=self._loop.budgets(),
            modalities=(TEXT, IMAGE) if self._has_images else (TEXT,),
            session_address=self._session_address,
        )

    def _pulled(self, event: PullEvent) -> None:
        self._outbox.record_pull(event)
        self._mailbox.put(event)

    def _on_command(self, command: DecodeCommand) -> None:
        if isinstance(command, Reserve):
            self._emission_check.on_attempt(command.id)

    def _check(self) -> None:
        if self._scheduler.num_preemptions != self._num_preemptions:
            self._num_preemptions = self._scheduler.num_preemptions
            self._network.trace.note(self.process.name, "Preempted")
        if self._scheduler.sent_back.num_given != self._num_given:
            self._num_given = self._scheduler.sent_back.num_given
            self._network.trace.note(self.process.name, "GivesSentBack")
        check_pages(self._cache, self._puller.pages_in_flight())
        if self._imports.num_reservable_pages < 0:
            raise Violation(
                "I6", f"{self.process.name} has reserved {-self._imports.num_reservable_pages} pages too many"
            )

    def _emit(self, effects: list[OutwardEffect]) -> None:
        for effect in effects:
            self._network.trace.note(self.process.name, f"{type(effect).__name__} {effect.id}", effect.id.request_id)
            if isinstance(effect, EmitTokens):
                for token in effect.tokens:
                    self._emission_check.on_token(effect.id, token.index)
        self._engine.after_step(partial(self._outbox.emit, effects))
