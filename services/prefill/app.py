"""Builds a prefill worker and runs it until it stops. Called by `baton.services.cli.serve`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc
import torch

from baton.domain.ids import Incarnation, new_incarnation
from baton.domain.worker import (
    ALL_IN_SESSIONS,
    CAPABILITIES,
    EMBEDDINGS,
    IMAGE,
    LOWER_TIER,
    NO_TOWER,
    SESSION_LINKS,
    TEXT,
    WorkerRecord,
    WorkerRole,
)
from baton.engine.build import Engine, build_engine, resolve_device
from baton.engine.handoff.cached_exports import CachedExports, ExportLimits
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.page_imports import PageImportLimits, PageImports
from baton.engine.handoff.page_source import ImportCostModel
from baton.engine.handoff.prompt_tags import PromptTags
from baton.engine.mailbox import Mailbox
from baton.engine.overlap.digest_thread import DigestThread, PageDigester
from baton.engine.page_scrub import PageScrub
from baton.engine.tiers.start import TierFiles, open_file_tier, open_host_tier
from baton.engine.turn import EngineTurn
from baton.kv.memory import pool_extent
from baton.kv.page_tags import PURPOSE, PoolTagger
from baton.kv.tiers.lower_tier import LowerTier
from baton.kv.tiers.tier_stack import TierStack
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import handoff_pb2_grpc, prefill_pb2_grpc, worker_pb2_grpc
from baton.rpc.server import RunningServer
from baton.services.prefill.commands import PrefillCommand, TierEnded
from baton.services.prefill.loop import PrefillLoop
from baton.services.prefill.media_gate import MediaGate
from baton.services.prefill.outbox import PrefillOutbox
from baton.services.prefill.overlap.scheduler import OverlapPrefillScheduler
from baton.services.prefill.overlap.steps import StepQueue
from baton.services.prefill.page_sharing import PageSharing
from baton.services.prefill.peer_reader import PeerReader
from baton.services.prefill.policy import BurstGate, PrefillLimits
from baton.services.prefill.scheduler import PrefillScheduler
from baton.services.prefill.server import PrefillServicer, PrefillStreamEvent
from baton.services.prefill.settings import PrefillSettings
from baton.settings.groups import MIB
from baton.settings.model_source import model_name
from baton.telemetry.logs import get_logger
from baton.transfer import nixl
from baton.transfer.base import region_of, window_region_of
from baton.transfer.factory import make_source, usable_transports
from baton.transfer.stream.source import StreamSource
from baton.worker.budget_control import BudgetControl, BudgetRules
from baton.worker.event_log import SharedEventLog
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.handoff.handoff_server import HandoffServicer
from baton.worker.health.servicer import WorkerHealth, add_standard_services
from baton.worker.identity.address import page_endpoint, session_endpoint
from baton.worker.kv_events.start import start_kv_events
from baton.worker.lifecycle import WorkerContext, make_registration, run_worker, start_serving
from baton.worker.media.embedding_puller import EmbeddingPuller, EncoderRegistry
from baton.worker.media.embedding_reader import EmbeddingReader
from baton.worker.media.image_decoder import MAX_PIXELS, ImageDecoder
from baton.worker.media.media_receiver import MediaReceiver, media_limits
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
IMPORT_SHARE = 0.25
"""Of the pool: most pages that imports of cached pages read into at once."""
PULL_WINDOW_PAGES = 64
PULL_DEADLINE_S = 5.0
WATCH_TIMEOUT_S = 60.0
"""Longest silence of a watched handoff. A prompt that waits is silent, so this does not measure health."""


async def serve(settings: PrefillSettings) -> int:
    """Runs the worker; returns the process's exit code. Raises `BatonError` or `OSError` when it cannot start."""
    return await run_worker(
        settings,
        WorkerRole.PREFILL,
        lambda: build_engine(
            settings, 0, media_bytes=settings.media_cache_mib * MIB, step_tokens=settings.token_budget
        ),
        lambda engine, context: _Worker(settings, engine, context).run(),
    )


class _Worker:
    """All parts of one prefill worker."""

    def __init__(self, settings: PrefillSettings, engine: Engine, context: WorkerContext) -> None:
        self._settings = settings
        self._context = context
        self._trust, self._store = context.trust, context.store
        self._engine = engine
        self._lifecycle = lifecycle = context.lifecycle
        self._stack = stack = context.stack
        if engine.touch is not None:
            engine.touch.on_failure(lifecycle.on_crash)
            stack.callback(engine.touch.close)
        self._id = context.worker_id
        self._incarnation: Incarnation = new_incarnation()
        self._model = model_name(settings.model)
        self._mailbox: Mailbox[PrefillCommand] = Mailbox(1024)
        self._streams: AttemptStreams[PrefillStreamEvent] = AttemptStreams(on_empty=lifecycle.on_idle)
        self._handoffs = HandoffLog(self._streams.is_open)
        self._recent = RecentAttempts()
        self._events = SharedEventLog()
        self._events.attach(engine.cache, start_kv_events(settings, engine.geometry.page_size, stack))
        self._registration = make_registration(context, settings, self._record)
        self._peers: PeerReader | None = None
        if settings.shares_pages:
            announce_soon = self._registration.announce_soon
            self._peers = PeerReader(settings, engine, context, self._incarnation, self._mailbox, announce_soon)
        submit, client = (lambda pull: None, None) if self._peers is None else (self._peers.submit, self._peers.client)
        self._outbox = PrefillOutbox(self._handoffs, self._streams, self._recent, submit, client)
        names = usable_transports(settings.transport.value)
        made_of = (self._id, self._incarnation, engine.memory, context.trust, page_endpoint(settings))
        self._sources = {name: make_source(name, *made_of) for name in names}
        for source in self._sources.values():
            stack.callback(source.close)
        self._tags = self._make_tags()
        self._loop = self._make_loop()
        rules = BudgetRules(WorkerRole.PREFILL, engine.geometry.page_size)
        self._budgets = BudgetControl(rules, self._mailbox, self._loop.budgets, self._registration.announce)
        self._address = ""
        self._servicer = self._make_servicer()
        handlers = SessionHandlers(self._servicer.abort, prefill=self._servicer.prefill)
        self._exporter = self._make_exporter()
        # Once: sessions outlive a gRPC server that is started again.
        sessions = listen_for_sessions(
            handlers, self._trust, self._incarnation, engine.max_model_len, self._exporter.handlers
        )
        self._sessions = SessionService(sessions, self._trust, self._incarnation, session_endpoint(settings))
        stack.push_async_callback(self._sessions.close)

    async def run(self) -> None:
        """Serves until stopped, then drains and closes."""
        settings = self._settings
        await self._sessions.start()
        serving = await start_serving(
            self._context, settings, WorkerRole.PREFILL, self._incarnation, self._loop, self._register
        )
        if serving is None:
            return
        server, self._address = serving
        log.info(
            "prefill_serving",
            address=self._address,
            worker=self._id,
            session_port=self._sessions.address,
            transports=list(self._sources),
            page_tags=self._tags is not None,
            pool=pool_extent(self._engine.memory),
        )
        await self._lifecycle.run(
            self._registration,
            log_status_forever(self._loop.activity, self._loop.load),
            *(() if self._peers is None else self._peers.tasks()),
            num_requests=self._num_requests,
            drain_timeout_s=settings.drain_timeout_s,
            close=partial(self._close, server),
        )
        log.info("prefill_stopped", exit_code=self._lifecycle.exit_code)

    async def _close(self, server: RunningServer) -> None:
        await self._sessions.leave("the worker leaves")  # a session is a call without end
        await server.stop(SERVER_GRACE_S)
        if self._peers is not None:
            await self._peers.close()

    def _num_requests(self) -> int:
        """Number of requests that a drain waits for: prompts, uncommitted exports and open streams."""
        return max(self._loop.num_requests, len(self._streams))

    def _register(self, server: grpc.aio.Server) -> None:
        worker = WorkerServicer(
            self._incarnation, self._lifecycle, self._num_requests, self._recent, self._events, self._budgets
        )
        health = WorkerHealth(self._lifecycle)
        services = ("baton.v1.Prefill", "baton.v1.Handoff", "baton.v1.Worker")
        add_standard_services(server, health, self._trust, services)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, server)
        self._sessions.register(server)
        handoff_pb2_grpc.add_HandoffServicer_to_server(self._exporter, server)

    def _make_exporter(self) -> HandoffServicer:
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
            granted_lease_s=None if self._settings.digests else self._settings.export_lease_s,
            num_page_parts=len(memory.part_ends),
            gives_cached=self._settings.shares_pages,
        )
        streams = [source for source in self._sources.values() if isinstance(source, StreamSource)]
        read_pages = streams[0].read_pages if streams else None
        return HandoffServicer(terms, self._mailbox, self._handoffs, read_pages)

    def _make_servicer(self) -> PrefillServicer:
        validator = EngineRequestValidator(self._engine.vocab_size, self._engine.max_model_len, self._engine.media)
        servicer = PrefillServicer(
            self._mailbox, self._streams, lambda: self._lifecycle.draining, validator, self._engine.masks,
            None if self._peers is None else self._peers.links,
        )  # fmt: skip
        servicer.media = self._make_receiver()
        return servicer

    def _record(self) -> WorkerRecord:
        vision = self._engine.vision
        return WorkerRecord(
            id=self._id,
            role=WorkerRole.PREFILL,
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
            capabilities=self._capabilities(),
            links=() if self._peers is None else self._peers.records(),
            budgets=self._loop.budgets(),
            session_address=self._sessions.address,
            modalities=(TEXT,) if vision is None else (TEXT, IMAGE),
            processor="" if vision is None else vision.digest,
            vision="" if vision is None else vision.fingerprint,
        )

    def _capabilities(self) -> tuple[str, ...]:
        vision, found = self._engine.vision, [*CAPABILITIES, *ALL_IN_SESSIONS, SESSION_LINKS]
        if vision is not None and self._settings.pulls_embeddings:
            found.append(EMBEDDINGS)
        if vision is not None and vision.encoder is None:
            found.append(NO_TOWER)
        if self._settings.host_tier_mib > 0 or self._settings.file_tier_dir is not None:
            found.append(LOWER_TIER)
        return tuple(found)

    def _make_receiver(self) -> MediaReceiver | None:
        vision = self._engine.vision
        if vision is None:
            return None
        settings, held_bytes = self._settings, vision.store.max_bytes
        limits = media_limits(self._engine.max_model_len, settings.encode_budget_tokens, held_bytes)
        if (needed := limits.max_rows * vision.format.row_bytes) > held_bytes:
            log.warning("media_cache_is_small", held_bytes=held_bytes, largest_image_bytes=needed)
        decoder = ImageDecoder(MAX_PIXELS)
        self._stack.callback(decoder.close)
        receiver = MediaReceiver(
            vision.processor, vision.digest, vision.format.row_bytes, decoder, limits, self._mailbox.try_put
        )
        receiver.has_tower = vision.encoder is not None
        if settings.pulls_embeddings:
            channels = ChannelPool(self._trust)
            self._stack.push_async_callback(channels.close)
            encoders = EncoderRegistry(self._store, self._trust)
            device = torch.device(resolve_device(settings.device))
            receiver.puller = EmbeddingPuller(encoders, channels, vision.format, vision.fingerprint, device)
            if nixl.TRANSPORT in self._sources:
                reader = EmbeddingReader(self._id, self._incarnation, self._trust)
                self._stack.push_async_callback(reader.close)
                receiver.puller.reader = reader
        return receiver

    def _make_tags(self) -> PromptTags | None:
        engine, key = self._engine, self._trust.key(PURPOSE)
        if not uses_tags(self._settings, self._trust, self._sources, engine.memory.kind) or key is None:
            return None
        tagger = PoolTagger(engine.memory, key, self._incarnation)
        return PromptTags(engine.cache.pool.digests, tagger, engine.geometry.page_size, engine.fingerprint.digest)

    def _make_sharing(self, turn: EngineTurn[PrefillCommand], exports: ExportTable) -> PageSharing:
        """Raises `SettingsError` if a tier cannot be used."""
        settings, cache, step_time = self._settings, self._engine.cache, turn.steps.step_time
        num_pages = cache.pool.num_pages

        def compute_s(num_pages: int, first: int) -> float:
            size = settings.page_size
            if not step_time.reliable:
                return 0.0
            return step_time.seconds_of(num_pages * size, first * size, settings.token_budget)

        imports = cached = None
        if self._peers is not None:
            costs = ImportCostModel(settings.page_sharing, self._engine.memory.page_bytes, compute_s)
            tagged = None if self._tags is None else self._engine.fingerprint.digest
            bounds = PageImportLimits(max(1, int(IMPORT_SHARE * num_pages)), PULL_WINDOW_PAGES, PULL_DEADLINE_S, tagged)
            imports = PageImports(cache, bounds, costs)
        if settings.shares_pages:
            limits = ExportLimits(settings.max_given_pages(num_pages), lambda: cache.num_available)
            cached = CachedExports(cache, exports, self._engine.checks, limits, self._tags)
        return PageSharing(self._make_tier(compute_s), imports, cached)

    def _make_tier(self, compute_s: Callable[[int, int], float]) -> LowerTier | None:
        settings, tiers = self._settings, list[LowerTier]()
        if settings.host_tier_mib > 0:
            tiers.append(open_host_tier(settings.host_tier_mib, settings.host_tier_write, self._engine, compute_s))
        if settings.file_tier_dir is not None:
            most, write, mover = settings.file_tier_bytes, settings.file_tier_write, settings.file_tier_mover
            files = TierFiles(settings.file_tier_dir, most, write, mover)
            tier, close = open_file_tier(files, self._engine, compute_s, lambda: self._mailbox.put(TierEnded()))
            self._stack.callback(close)
            tiers.append(tier)
        return TierStack(tiers) if tiers else None

    def _make_digester(self) -> PageDigester | None:
        hasher = self._engine.cache.hasher
        if hasher is None:
            return None
        digester = DigestThread(hasher)
        self._stack.callback(digester.close)
        return digester

    def _make_loop(self) -> PrefillLoop:
        settings, engine = self._settings, self._engine
        num_pages = engine.cache.pool.num_pages
        turn = EngineTurn(
            WorkerRole.PREFILL, engine.cache, self._mailbox, self._lifecycle.on_idle, settings.max_idle_check_pages
        )
        limits = PrefillLimits(
            page_size=engine.geometry.page_size,
            token_budget=settings.token_budget,
            max_partial_prompts=settings.max_partial_prompts,
            max_pinned_pages=max(1, int(settings.pin_fraction * num_pages)),
            long_prompt_tokens=settings.long_prompt_tokens(engine.max_model_len),
            order=settings.order(),
            leaves_a_quarter=settings.long_prefill_token_threshold is None,
            equal_time=settings.equal_time(turn.steps.step_time),
            whole_images=engine.media is not None and engine.media.block_rows is not None,
        )
        exports = ExportTable(engine.cache.pool, settings.export_lease_s, grants_leases=not settings.digests)
        scrub = PageScrub(engine.checks, engine.memory.page_bytes, self._lifecycle.on_unfit)
        sharing = self._make_sharing(turn, exports)
        # A step ahead has no window slots reserved.
        is_ahead = settings.overlap_scheduling and engine.runner.is_async and engine.cache.pool.windows is None
        make = OverlapPrefillScheduler if is_ahead else PrefillScheduler
        scheduler = make(engine.cache, exports, limits, engine.checks, self._tags, sharing)
        loop = PrefillLoop(turn, scheduler, exports, engine.runner, scrub, self._outbox.emit)
        if isinstance(scheduler, OverlapPrefillScheduler):
            log.info("overlap_scheduling", device=engine.runner.device)
            engine.runner.overlaps = True
            loop.ahead = StepQueue(scheduler, engine.runner.start, turn.steps, self._make_digester())
        if engine.vision is not None:
            scheduler.media = MediaGate(engine.vision.store, settings.encode_budget_tokens)
            loop.encoder = engine.vision.encoder
        if settings.core_lease_file is not None:
            loop.burst = BurstGate(turn.steps.step_time)
        return loop
