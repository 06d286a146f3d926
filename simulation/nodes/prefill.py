"""A simulated prefill worker: every module of the real one, wired as `baton.services.prefill.app._Worker` wires them.

Real: loop, scheduler, exports, imports, links, handoff log, both servicers, registration. Simulated: threads, sockets,
memory, model.
`_record` mirrors the method of the same name there, and `leave` the end of `run`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, cast

from baton.domain.ids import WorkerId
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
from baton.engine.handoff.cached_exports import ExportLimits
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.page_imports import PageImportLimits
from baton.engine.handoff.page_source import ImportCostModel
from baton.engine.page_scrub import PageScrub
from baton.engine.tiers.controller import TierController, TierMover
from baton.engine.turn import EngineTurn
from baton.grammar.tokenizer import CAPABILITY
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Owner
from baton.kv.tiers.tier import CacheTier
from baton.kv.tiers.tier_stack import TierStack
from baton.rpc.gen import handoff_pb2_grpc, prefill_pb2_grpc
from baton.services.prefill.commands import AddPrompt, PrefillCommand, PrefillEvent, TierEnded
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.outbox import PrefillOutbox
from baton.services.prefill.page_sharing import PageSharing
from baton.services.prefill.policy import PolicySettings, PrefillLimits
from baton.services.prefill.scheduler import NOT_SHARED
from baton.services.prefill.server import PrefillServicer, PrefillStreamEvent
from baton.settings.choices import PageSharingKind
from baton.settings.tiers import TierWrite
from baton.transfer.base import Pull, region_of, window_region_of
from baton.transfer.fake import TRANSPORT
from baton.transfer.host_tier.mover import HostMover
from baton.worker.budget_control import BudgetChange, BudgetControl, BudgetRules
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_server import HandoffServicer
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.registration import Registration
from baton.worker.sessions.listener import listen_for_sessions
from baton.worker.sessions.session_handlers import SessionHandlers
from baton.worker.streams import AttemptStreams
from simulation.announced_fits import AnnouncedFits
from simulation.checks.invariants import EmissionCheck, check_idle, check_pages
from simulation.nodes.engine import SimEngine, SimMailbox, SimRunner
from simulation.nodes.environment import SimEnvironment
from simulation.nodes.file_tier import SimFileMover
from simulation.nodes.peer_reader import SimPeerReader
from simulation.nodes.state_store import SimStore
from simulation.policies import CONFIG, IMAGE_INTAKE, INTAKE, MODEL, PolicyClasses, model_fingerprint
from simulation.runtime.grpc_calls import SimServer
from simulation.runtime.network import Endpoint
from simulation.runtime.page_memory import SimMemory, sim_cache
from simulation.runtime.page_rot import flip_bits, settled_pages
from simulation.runtime.process import SimProcess
from simulation.runtime.session_ports import session_address
from simulation.runtime.session_wire import SimWire
from simulation.runtime.step_time import ScriptedStepTime, attentive
from simulation.scenario import VOCAB_SIZE, Scenario
from simulation.vision.images import PROCESSOR
from simulation.vision.worker import FINGERPRINT, SimWorkerVision

WATCH_TIMEOUT_S = 60.0
SERVER_GRACE_S = 1.0
"""Copied from `baton.services.prefill.app`, which would import the model."""


class SimPrefill:
    """One life of one prefill worker. Created inside its own process."""

    def __init__(self, process: SimProcess, environment: SimEnvironment, version: int) -> None:
        network, policies, scenario = environment.network, environment.policies, environment.scenario
        digests, plan = scenario.digests, scenario.scheduling
        self.process = process
        self._fits = None
        if scenario.fits:
            self._fits = AnnouncedFits(Random(f"fits {scenario.seed} {process.name}"), scenario.mean_step_s)
        self._plan, self._mean_step_s = plan, scenario.mean_step_s
        self._session_address = session_address(process.name, scenario.session_ports)
        self._fingerprint = model_fingerprint(version)
        self._network = network
        self._lifecycle = policies.lifecycle(asyncio.Event())
        self._emission_check = EmissionCheck(process.name)
        self._cache, self._memory = sim_cache(
            CONFIG.num_prefill_pages, CONFIG.page_size, scenario.num_window_slots, scenario.eviction, digests=digests
        )
        checks = PageChecks(self._cache)
        self._exports = policies.export_table(self._cache.pool, CONFIG.lease_s, grants_leases=not digests)
        limits = self._make_limits(scenario)
        sharing = self._make_sharing(policies, checks) if scenario.gives_pages else NOT_SHARED
        self._mailbox: SimMailbox[PrefillCommand] = SimMailbox(1024, self._on_command)
        self._tiers: list[CacheTier] = []
        self._disk = environment.disk(process.name, self._fingerprint.digest)
        tiers = self._make_tiers(scenario.host_write, plan.file_write)
        if tiers:
            sharing = replace(sharing, tier=TierStack(tiers))
        scheduler = policies.prefill_scheduler(self._cache, self._exports, limits, checks, None, sharing)
        self._scheduler = scheduler
        runner = SimRunner(self._memory, CONFIG.page_size, VOCAB_SIZE, version=version)
        runner.window, runner.windows = self._cache.window, self._cache.pool.windows
        self._streams: AttemptStreams[PrefillStreamEvent] = AttemptStreams(on_empty=self._lifecycle.on_idle)
        self._handoffs = policies.handoff_log(self._streams.is_open)
        self._engine = SimEngine(
            process, runner, self._mailbox.end_wait, self._check, environment.on_crash, scenario.mean_step_s
        )
        turn = EngineTurn(WorkerRole.PREFILL, self._cache, self._mailbox, self._lifecycle.on_idle)
        scrub = PageScrub(checks, self._memory.page_bytes)
        self._loop = PrefillLoop(turn, scheduler, self._exports, runner, scrub, self._emit)
        self._vision = self._make_vision(environment, runner) if scenario.images else None
        self._mailbox.on_arrival = self._engine.wake
        self._masks = runner.masks
        sim_store = SimStore(environment.store_server, network, process, CONFIG.heartbeat_s)
        self._registration = Registration(sim_store, self._record, CONFIG.heartbeat_s, lambda _: process.kill())
        peers = (
            SimPeerReader(process, environment, self._memory, self._fingerprint, self._mailbox, self._registration)
            if scenario.gives_pages
            else None
        )
        self._peers = peers
        submit, client = (lambda pull: None, None) if peers is None else (peers.submit, peers.client)
        self._outbox = PrefillOutbox(self._handoffs, self._streams, RecentAttempts(), submit, client)
        self._listen(environment.page_network.add_source(process, self._memory), None if digests else CONFIG.lease_s)
        rules = BudgetRules(WorkerRole.PREFILL, CONFIG.page_size)
        self._configured = self._loop.budgets()
        self._budgets = BudgetControl(rules, self._mailbox, self._loop.budgets, self._registration.announce)
        self._engine.begin(self._loop)
        process.spawn(self._registration.run(), "background")
        if self._peers is not None:
            self._peers.begin()

    def _make_limits(self, scenario: Scenario) -> PrefillLimits:
        long_tokens = CONFIG.page_size * (self.process.incarnation % 2)  # some workers share steps, some do not
        return PrefillLimits(
            CONFIG.page_size,
            CONFIG.token_budget,
            self._plan.max_partial_prompts,
            CONFIG.max_pinned_pages,
            long_tokens,
            PolicySettings(
                scenario.prefill_policy,
                self._plan.oldest_prompt_share,
                scenario.max_overtakes,
                prefix_sharing=self._plan.prefix_sharing,
                by_priority=self._plan.by_priority,
            ),
            equal_time=ScriptedStepTime(attentive) if scenario.equal_steps else None,
        )

    def _compute_s(self, num_pages: int, first: int) -> float:
        """Seconds to compute pages, if importing and reading have to pay; else nobody knows."""
        return num_pages * self._mean_step_s if self._plan.sharing is PageSharingKind.CHEAPER else 0.0

    def _make_tiers(self, host_write: TierWrite | None, file_write: TierWrite | None) -> list[TierController]:
        """As `baton.services.prefill.app` does."""
        memory, parts = self._memory, self._memory.part_ends
        self._slots = SimMemory(CONFIG.num_host_slots, memory.page_bytes, parts)
        files = SimFileMover(
            self.process, self._disk, parts, lambda: self._mailbox.put(TierEnded()), self._network.trace
        )
        movers: list[tuple[TierMover, TierWrite | None, int]] = [
            (HostMover(self._slots), host_write, CONFIG.num_host_slots),
            (files, file_write, CONFIG.num_file_slots),
        ]
        made = []
        for mover, write, num_slots in movers:
            if write is not None:
                tier = CacheTier(num_slots, num_parts=self._cache.pool.num_window_parts)
                made.append(TierController(tier, mover, self._cache, memory, write, self._compute_s))
                self._tiers.append(tier)
                if mover is files:
                    tier.restore([*self._disk.index.values()])
        return made

    def _make_sharing(self, policies: PolicyClasses, checks: PageChecks) -> PageSharing:
        """As `baton.services.prefill.app` does."""
        cache, page_bytes = self._cache, self._memory.page_bytes
        costs = ImportCostModel(self._plan.sharing, page_bytes, self._compute_s)
        bounds = PageImportLimits(CONFIG.max_imported_pages, CONFIG.max_window_pages, CONFIG.pull_deadline_s)
        limits = ExportLimits(CONFIG.max_given_pages, lambda: cache.num_available)
        exports = policies.cached_exports(cache, self._exports, checks, limits)
        return PageSharing(None, policies.page_imports(cache, bounds, costs), exports)

    def _make_vision(self, environment: SimEnvironment, runner: SimRunner) -> SimWorkerVision:
        """As `baton.services.prefill.app` does."""
        mark = partial(setattr, runner, "has_run", True)
        vision = SimWorkerVision(self.process, environment, self._mailbox.try_put, mark, exports=False)
        self._scheduler.media = environment.policies.media_gate(vision.store, CONFIG.encode_budget_rows)
        self._loop.encoder = vision.encoder if environment.scenario.towers else None
        runner.images = vision.store
        return vision

    async def leave(self) -> None:
        """SIGTERM; returns when the process would exit."""
        await self._lifecycle.drain(self._registration.announce, self._num_requests, CONFIG.drain_s)
        await self._sessions.leave("the worker leaves")
        await self._listener.stop(SERVER_GRACE_S)
        if self._peers is not None:
            await self._peers.close()
        await self._registration.withdraw()

    def _check(self) -> None:
        check_pages(self._cache, [] if self._peers is None else self._peers.pages_in_flight())
        if self._vision is not None:
            self._vision.check()
        for tier in self._tiers:
            tier.check()

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
        left = {"exports": len(self._exports), "handoffs": len(self._handoffs), "streams": len(self._streams)}
        left["imports"] = len(self._scheduler.imports)
        if self._vision is not None:
            left |= {"wanted images": self._scheduler.media.num_wanted, **self._vision.left()}
        check_idle(self.process.name, self._cache.pool, left)

    def rot(self, rng: Random) -> list[int]:
        """Flips bits of settled pages that no prompt holds, of copies in tiers and of an embedding.

        Returns the pages.
        """
        flip_bits(rng, self._slots, range(self._slots.num_pages))
        self._disk.rot(rng)
        if self._vision is not None:
            self._vision.rot(Random(f"embeddings of {self.process.name} at {asyncio.get_running_loop().time()}"))
        return flip_bits(rng, self._memory, settled_pages(self._cache.pool, (Owner.CACHED, Owner.PINNED)))

    def _listen(self, metadata: bytes, granted_lease_s: float | None) -> None:
        worker_id, memory = WorkerId(self.process.name), self._memory
        terms = LinkConfig(
            worker_id, self.process.incarnation, MODEL, self._fingerprint, {TRANSPORT: metadata}, memory.address,
            memory.num_pages, region_of(memory).page_bytes, WATCH_TIMEOUT_S, granted_lease_s, len(memory.part_ends),
            self._peers is not None, window_region_of(memory),
        )  # fmt: skip
        server = SimServer()
        handoffs = HandoffServicer(terms, self._mailbox, self._handoffs, None)
        links = None if self._peers is None else self._peers.links
        prefill = PrefillServicer(
            self._mailbox, self._streams, lambda: self._lifecycle.draining,
            INTAKE if self._vision is None else IMAGE_INTAKE, self._masks, links,
        )  # fmt: skip
        prefill.media = None if self._vision is None else self._vision.receiver
        prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, cast(Any, server))
        handoff_pb2_grpc.add_HandoffServicer_to_server(handoffs, cast(Any, server))
        self._listener = self._network.hosts[self.process.name] = Endpoint(self.process, server.handlers)
        handlers, exporter = SessionHandlers(prefill.abort, prefill=prefill.prefill), handoffs.handlers
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
            role=WorkerRole.PREFILL,
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
            grammars=CAPABILITY,
            capabilities=(
                *CAPABILITIES,
                *ALL_IN_SESSIONS,
                SESSION_LINKS,
                *(() if self._vision is None else self._vision.capabilities),
            ),
            links=() if self._peers is None else self._peers.links.records(),
            budgets=self._loop.budgets(),
            modalities=(TEXT,) if self._vision is None else (TEXT, IMAGE),
            processor="" if self._vision is None else PROCESSOR,
            vision="" if self._vision is None else FINGERPRINT,
            session_address=self._session_address,
        )

    def _on_command(self, command: PrefillCommand) -> None:
        if isinstance(command, AddPrompt):
            self._emission_check.on_attempt(command.request.id)

    def _emit(self, events: list[PrefillEvent]) -> None:
        for event in events:
            request = None if isinstance(event, Pull) else event.id.request_id
            self._network.trace.note(self.process.name, f"{type(event).__name__} {event.id}", request)
            if isinstance(event, Seal):
                self._emission_check.on_token(event.id, event.index)
        self._engine.after_step(partial(self._outbox.emit, events))
