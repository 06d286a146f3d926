"""Builds a decode worker and runs it until it stops. Called by `baton.services.cli.serve`."""

from __future__ import annotations

from functools import partial

import grpc

from baton.domain.ids import Incarnation, new_incarnation
from baton.domain.timing.step_time import StepTimeModel
from baton.domain.worker import ALL_IN_SESSIONS, CAPABILITIES, IMAGE, SESSION_LINKS, TEXT, WorkerRecord, WorkerRole
from baton.engine.build import Engine, build_engine
from baton.engine.drafts.budget import DraftBudget
from baton.engine.drafts.guard import GuardedDrafter
from baton.engine.drafts.meter import DraftMeter
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS, DraftPolicy
from baton.engine.drafts.registry import find_drafter, make_drafter, require_trees
from baton.engine.drafts.runner_drafter import max_chain
from baton.engine.handoff.cached_exports import CachedExports, ExportLimits
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.prompt_tags import PromptTags
from baton.engine.mailbox import Mailbox
from baton.engine.overlap.digest_thread import DigestThread
from baton.engine.overlap.page_fence import PageFence
from baton.engine.page_scrub import PageScrub
from baton.engine.turn import EngineTurn
from baton.kv.geometry import PageWindow, leading_parts_of
from baton.kv.memory import pool_extent
from baton.kv.page_tags import PURPOSE, PoolTagger
from baton.kv.swap_space import SwapSpace
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import decode_pb2_grpc, handoff_pb2_grpc, worker_pb2_grpc
from baton.rpc.server import RunningServer
from baton.services.decode.commands import DecodeCommand
from baton.services.decode.handoff_client import HandoffClient
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits
from baton.services.decode.loop import DecodeHooks, DecodeLoop
from baton.services.decode.outbox import DecodeOutbox
from baton.services.decode.page_exports import PageExports
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.rows.order import RowOrder
from baton.services.decode.rows.overlap_scheduler import OverlapScheduler
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.rows.unsettled_pages import UnsettledRows
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.decode.server import DecodeServicer
from baton.services.decode.serving.attempts import AttemptServer, DecodeStreamEvent, ServicerConfig
from baton.services.decode.serving.sessions import serve_attempts
from baton.services.decode.settings import DecodeSettings
from baton.settings.model_source import model_name
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.transfer.base import PullEvent, region_of, window_region_of
from baton.transfer.factory import make_pullers, make_source, usable_transports
from baton.transfer.stream.source import StreamSource
from baton.worker.budget_control import BudgetControl, BudgetRules
from baton.worker.event_log import SharedEventLog
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.handoff.handoff_server import HandoffServicer
from baton.worker.handoff.link_sessions import open_link_sessions
from baton.worker.handoff.links import LINK_GRACE_TTLS, LinkIdentity, PeerLinks
from baton.worker.handoff.session_or_call import PeerClients
from baton.worker.health.servicer import WorkerHealth, add_standard_services
from baton.worker.identity.address import page_endpoint, session_endpoint
from baton.worker.kv_events.start import start_kv_events
from baton.worker.lifecycle import WorkerContext, make_registration, run_worker, start_serving
from baton.worker.page_tagging import uses_tags
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.request_validator import EngineRequestValidator
from baton.worker.server import WorkerServicer
from baton.worker.sessions.listener import listen_for_sessions
from baton.worker.sessions.session_handlers import SessionHandlers
from baton.worker.sessions.session_service import SessionService
from baton.worker.status_line import log_status_forever
from baton.worker.streams import AttemptStreams

log = get_logger()

SERVER_GRACE_S = 1.0
WATCH_TIMEOUT_S = 5.0
"""Longest silence of a watched handoff; here nobody has anything to watch."""


async def serve(settings: DecodeSettings) -> int:
    """Runs the worker; returns the process's exit code. Raises `BatonError` or `OSError` when it cannot start."""
    # A drafter that cannot be made ends the process before it loads a model.
    entry = find_drafter(settings.drafter, settings.draft_model is not None)
    require_trees(settings.drafter, entry, settings.tree_widths)
    max_graph_rows = settings.max_rows if settings.cuda_graphs else 0
    make_engine = partial(
        build_engine, settings, settings.host_pages, max_graph_rows, decodes=True, step_tokens=settings.max_step_tokens
    )
    return await run_worker(
        settings, WorkerRole.DECODE, make_engine, lambda engine, context: _Worker(settings, engine, context).run()
    )


class _Worker:
    """All parts of one decode worker."""

    def __init__(self, settings: DecodeSettings, engine: Engine, context: WorkerContext) -> None:
        self._settings = settings
        self._context = context
        self._trust = context.trust
        self._engine = engine
        self._store = context.store
        self._lifecycle = lifecycle = context.lifecycle
        self._stack = stack = context.stack
        if engine.touch is not None:
            engine.touch.on_failure(lifecycle.on_crash)
            stack.callback(engine.touch.close)
        self._id = context.worker_id
        self._incarnation: Incarnation = new_incarnation()
        self._model = model_name(settings.model)
        self._mailbox: Mailbox[DecodeCommand] = Mailbox(4 * settings.max_rows + 64)
        self._streams: AttemptStreams[DecodeStreamEvent] = AttemptStreams(on_empty=lifecycle.on_idle)
        self._registration = make_registration(context, settings, self._record)
        transports = usable_transports(settings.transport.value)
        memory = engine.memory
        self._sources = {}
        if settings.shares_pages:
            made_of = (self._id, self._incarnation, memory, context.trust, page_endpoint(settings))
            self._sources = {name: make_source(name, *made_of) for name in transports}
        for source in self._sources.values():
            stack.callback(source.close)
        self._puller = make_pullers(transports, self._id, self._incarnation, memory, self._pulled, context.trust)
        stack.callback(self._puller.close)
        self._links = self._make_links()
        self._validator = EngineRequestValidator(engine.vocab_size, engine.max_model_len, engine.media)
        num_parts = len(engine.memory.part_ends)
        self._handoffs = HandoffClient(
            self._links, self._mailbox, settings.renew_interval_s, self._validator, num_parts
        )
        self._recent = RecentAttempts()
        self._events = SharedEventLog()
        self._events.attach(engine.cache, start_kv_events(settings, engine.geometry.page_size, stack))
        self._servicer_config = ServicerConfig(
            self._validator,
            settings.reservation_deadline_s,
            lambda: lifecycle.draining,
            (self._id, self._incarnation),
            engine.masks,
        )
        self._attempts = AttemptServer(self._mailbox, self._streams, self._links, self._handoffs, self._servicer_config)
        self._servicer = DecodeServicer(self._mailbox, self._attempts, self._servicer_config)
        handlers = SessionHandlers(self._servicer.abort, serve_attempts(self._attempts), self._servicer.reserve)
        self._exporter = self._make_handoff_servicer() if self._sources else None
        sessions = listen_for_sessions(
            handlers, self._trust, self._incarnation, engine.max_model_len,
            None if self._exporter is None else self._exporter.handlers,
        )  # fmt: skip
        self._sessions = SessionService(sessions, self._trust, self._incarnation, session_endpoint(settings))
        stack.push_async_callback(self._sessions.close)
        self._outbox = DecodeOutbox(self._streams, self._handoffs, self._links, self._recent)
        self._checks_tags = uses_tags(settings, context.trust, transports, memory.kind)
        self._loop = self._make_loop()
        rules = BudgetRules(WorkerRole.DECODE, engine.geometry.page_size)
        self._budgets = BudgetControl(rules, self._mailbox, self._loop.budgets, self._registration.announce)
        self._address = ""

    async def run(self) -> None:
        """Serves until stopped, then drains and closes."""
        settings = self._settings
        await self._sessions.start()
        serving = await start_serving(
            self._context, settings, WorkerRole.DECODE, self._incarnation, self._loop, self._register
        )
        if serving is None:
            return
        server, self._address = serving
        log.info(
            "decode_serving",
            address=self._address,
            worker=self._id,
            session_port=self._sessions.address,
            transports=",".join(self._puller.transports),
            page_tags=self._checks_tags,
            pool=pool_extent(self._engine.memory),
        )
        await self._lifecycle.run(
            self._registration,
            self._links.run(),
            self._handoffs.renew_forever(),
            log_status_forever(self._loop.activity, self._loop.load),
            num_requests=self._num_requests,
            drain_timeout_s=settings.drain_timeout_s,
            close=partial(self._close, server),
        )
        self._links.close()
        log.info("decode_stopped", exit_code=self._lifecycle.exit_code)

    async def _close(self, server: RunningServer) -> None:
        # A session is a call without end, for which the server would wait.
        await self._sessions.leave("the worker leaves")
        await server.stop(SERVER_GRACE_S)
        await self._handoffs.close()

    def _num_requests(self) -> int:
        """Number of requests that a drain waits for: imports, rows and open streams."""
        return max(self._loop.num_requests, len(self._streams))

    def _register(self, server: grpc.aio.Server) -> None:
        worker = WorkerServicer(
            self._incarnation, self._lifecycle, self._num_requests, self._recent, self._events, self._budgets
        )
        health = WorkerHealth(self._lifecycle, lambda: bool(self._links.up()))
        services = ("baton.v1.Decode", "baton.v1.Handoff", "baton.v1.Worker")
        add_standard_services(server, health, self._trust, services)
        if self._exporter is not None:
            handoff_pb2_grpc.add_HandoffServicer_to_server(self._exporter, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(self._servicer, server)
        self._sessions.register(server)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)

    def _make_handoff_servicer(self) -> HandoffServicer:
        memory = self._engine.memory
        terms = LinkConfig(
            worker_id=self._id,
            incarnation=self._incarnation,
            model=self._model,
            fingerprint=self._engine.fingerprint,
            transports={name: source.metadata() for name, source in self._sources.items()},
            base_address=memory.address,
            num_pages=memory.num_pages,
            page_bytes=region_of(memory).page_bytes,
            window_region=window_region_of(memory),
            watch_timeout_s=WATCH_TIMEOUT_S,
            num_page_parts=len(memory.part_ends),
            gives_cached=True,
        )
        streams = [source for source in self._sources.values() if isinstance(source, StreamSource)]
        read_pages = streams[0].read_pages if streams else None
        return HandoffServicer(terms, self._mailbox, HandoffLog(), read_pages)

    def _make_page_exports(self, import_policy: ImportPolicy) -> PageExports | None:
        settings, engine = self._settings, self._engine
        if not settings.shares_pages:
            return None
        key, tags = self._trust.key(PURPOSE), None
        if self._checks_tags and key is not None:
            tagger = PoolTagger(engine.memory, key, self._incarnation)
            size, fingerprint = engine.geometry.page_size, engine.fingerprint.digest
            tags = PromptTags(engine.cache.pool.digests, tagger, size, fingerprint)
        exports = ExportTable(engine.cache.pool, settings.export_lease_s)
        num_pages = engine.cache.pool.num_pages
        limits = ExportLimits(settings.max_given_pages(num_pages), import_policy.num_free_pages)
        return PageExports(exports, CachedExports(engine.cache, exports, engine.checks, limits, tags), import_policy)

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self._id,
            role=WorkerRole.DECODE,
            incarnation=self._incarnation,
            address=self._address,
            model=self._model,
            fingerprint=self._engine.fingerprint.digest,
            page_size=self._engine.geometry.page_size,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
            status=self._lifecycle.status,
            load=self._loop.load(),
            text_digest=self._engine.text_digest,
            grammars=self._engine.grammars,
            kernels=self._engine.kernels,
            links=self._links.records(),
            broken_links=self._links.broken(),
            capabilities=(*CAPABILITIES, *ALL_IN_SESSIONS, *(() if self._exporter is None else (SESSION_LINKS,))),
            modalities=(TEXT,) if self._engine.media is None else (TEXT, IMAGE),
            budgets=self._loop.budgets(),
            page_bytes=self._engine.geometry.page_bytes,
            session_address=self._sessions.address,
        )

    def _make_links(self) -> PeerLinks:
        geometry = self._engine.geometry
        grace_s = LINK_GRACE_TTLS * self._settings.worker_ttl_s
        identity = LinkIdentity(
            self._id, self._incarnation, self._model, self._engine.fingerprint, geometry.page_bytes, grace_s,
            num_leading_parts=leading_parts_of(geometry),
            has_window_slots=self._engine.cache.pool.windows is not None,
        )  # fmt: skip
        channels = ChannelPool(self._trust)
        self._stack.push_async_callback(channels.close)
        sessions = open_link_sessions(
            self._settings.link_sessions, self._id, self._incarnation, self._trust, self._stack
        )
        peers = PeerClients(channels, sessions)
        return PeerLinks(identity, self._store, peers, self._puller, self._mailbox, self._registration.announce_soon)

    def _make_loop(self) -> DecodeLoop:
        settings, engine = self._settings, self._engine
        page_size = engine.geometry.page_size
        engine.cache.window = PageWindow.of(engine.geometry)
        limits = ImportLimits(
            page_size, settings.max_rows, settings.pull_window_pages, settings.pull_deadline_s,
            max_reservations=settings.max_reservations, window=engine.cache.window,
            max_row_tokens=settings.max_row_tokens, max_chunk_tokens=settings.max_step_tokens,
        )  # fmt: skip
        imports = ImportTable(engine.cache, limits)
        host = SwapSpace(engine.num_host_pages, engine.host_hasher, engine.cache.pool.num_window_parts)
        growth = settings.growth(page_size)
        turn = EngineTurn(
            WorkerRole.DECODE, engine.cache, self._mailbox, self._lifecycle.on_idle, settings.max_idle_check_pages
        )
        chunks = settings.chunk_budget(page_size, turn.steps.step_time)
        drafts = self._make_drafts(turn.steps.step_time)
        rows = RowRules(growth, drafts, RowOrder(settings.priority_scheduling))
        scheduler = DecodeScheduler(imports, host, page_size, chunks, rows)
        if settings.overlap_scheduling:
            engine.runner.overlaps = True
            log.info("overlap_scheduling", device=engine.runner.device)
            ahead = OverlapScheduler(imports, host, page_size, chunks, rows, PageFence(engine.cache.pool))
            ahead.unsettled, scheduler = self._make_unsettled(), ahead
        page_bytes = engine.memory.page_bytes
        faults = PageFaults(engine.cache, imports, scheduler, engine.checks, page_size, page_bytes)
        tagged = engine.fingerprint.digest if self._checks_tags else None
        rules = ImportRules(page_size, settings.digests, tagged)
        import_policy = ImportPolicy(engine.cache.pool, imports, scheduler, rules, faults, growth)
        start = engine.runner.start if engine.runner.is_async or settings.overlap_scheduling else None
        scrub = PageScrub(engine.checks, page_bytes, self._lifecycle.on_unfit)
        exports = self._make_page_exports(import_policy)
        meter = None if drafts is None else DraftMeter(settings.drafter, drafts.totals)
        hooks = DecodeHooks(self._outbox.emit, self._puller.submit, scrub, start, exports, meter)
        return DecodeLoop(turn, imports, scheduler, import_policy, engine.runner, hooks)

    def _make_unsettled(self) -> UnsettledRows | None:
        hasher, has_slots = self._engine.cache.hasher, self._engine.cache.pool.windows is not None
        if hasher is None or has_slots or not self._engine.runner.is_async:
            return None  # pages whose window parts have slots would keep these for longer than was reserved
        digester = DigestThread(hasher)
        self._stack.callback(digester.close)
        return UnsettledRows(digester)

    def _make_drafts(self, step_time: StepTimeModel) -> DraftPolicy | None:
        settings, engine = self._settings, self._engine
        entry = find_drafter(settings.drafter, settings.draft_model is not None, engine.num_head_layers > 0)
        if entry is None:
            return None
        refusal = engine.runner.tree_refusal
        widths = () if refusal else settings.tree_widths
        log.info("speculation", drafter=settings.drafter, tree=",".join(map(str, widths)))
        if refusal and settings.tree_widths:
            metrics.DEGRADED.labels("draft_trees").set(1)
            log.warning("draft_trees_off", reason=refusal, hint="Chains are drafted. Leave out --draft-tree.")
        drafter = GuardedDrafter(
            make_drafter(entry, engine.vocab_size, widths),
            engine.vocab_size,
            _report_drafter_off,
            allows_placeholders=entry.traits.needs_pages,
        )
        pool, page_size = engine.cache.pool, engine.geometry.page_size
        is_chain = entry.traits.needs_pages and not widths
        max_drafts = max_chain(engine.num_head_layers) if is_chain else MAX_DRAFT_TOKENS
        policy = DraftPolicy(drafter, max_drafts, page_size, pool, DraftBudget(step_time), engine.masks)
        policy.allows_trees = not refusal
        return policy

    def _pulled(self, event: PullEvent) -> None:
        self._outbox.record_pull(event)
        self._mailbox.put(event)


def _report_drafter_off(reason: str) -> None:
    metrics.DEGRADED.labels("drafter").set(1)
    log.error("drafter_off", reason=reason)
