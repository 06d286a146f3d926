"""Builds an encode worker and runs it until it stops. Called by `baton.services.cli.serve`."""

from __future__ import annotations

from functools import partial

import grpc

from baton.domain.ids import Incarnation, new_incarnation
from baton.domain.worker import IMAGE, TEXT, WorkerBudgets, WorkerRecord, WorkerRole
from baton.engine.mailbox import Mailbox
from baton.rpc.gen import encode_pb2_grpc, worker_pb2_grpc
from baton.services.encode.commands import EncodeCommand
from baton.services.encode.embedding_exports import EmbeddingExports
from baton.services.encode.engine import EncodeEngine, build_engine
from baton.services.encode.loop import EncodeLoop
from baton.services.encode.scheduler import EncodeScheduler
from baton.services.encode.server import EncodeServicer
from baton.services.encode.settings import EncodeSettings
from baton.settings.model_source import model_name
from baton.telemetry.logs import get_logger
from baton.transfer import nixl, stream
from baton.transfer.factory import usable_transports
from baton.worker.budget_control import BudgetControl, BudgetRules
from baton.worker.event_log import SharedEventLog
from baton.worker.health.servicer import WorkerHealth, add_standard_services
from baton.worker.lifecycle import WorkerContext, make_registration, run_worker, start_serving
from baton.worker.media.image_decoder import MAX_PIXELS, ImageDecoder
from baton.worker.media.media_receiver import MediaReceiver, media_limits
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.server import WorkerServicer
from baton.worker.status_line import log_status_forever

log = get_logger()

SERVER_GRACE_S = 1.0
MAX_COMMANDS = 1024


async def serve(settings: EncodeSettings) -> int:
    """Runs the worker; returns the process's exit code. Raises `BatonError` or `OSError` when it cannot start."""
    return await run_worker(
        settings,
        WorkerRole.ENCODE,
        lambda: build_engine(settings),
        lambda engine, context: _Worker(settings, engine, context).run(),
    )


class _Worker:
    """All parts of one encode worker."""

    def __init__(self, settings: EncodeSettings, engine: EncodeEngine, context: WorkerContext) -> None:
        self._settings = settings
        self._engine = engine
        self._context = context
        self._lifecycle = lifecycle = context.lifecycle
        self._incarnation: Incarnation = new_incarnation()
        self._model = model_name(settings.model)
        self._mailbox: Mailbox[EncodeCommand] = Mailbox(MAX_COMMANDS)
        scheduler = EncodeScheduler(engine.store, settings.encode_budget_tokens)
        self._loop = EncodeLoop(self._mailbox, scheduler, engine.encoder, lifecycle.on_idle)
        self._registration = make_registration(context, settings, self._record)
        rules = BudgetRules(WorkerRole.ENCODE, page_size=1)
        self._budgets = BudgetControl(rules, self._mailbox, WorkerBudgets, self._registration.announce)
        self._exports = self._make_exports()
        self._address = ""

    async def run(self) -> None:
        """Serves until stopped, then drains and closes."""
        settings = self._settings
        serving = await start_serving(
            self._context, settings, WorkerRole.ENCODE, self._incarnation, self._loop, self._register
        )
        if serving is None:
            return
        server, self._address = serving
        transports = [stream.TRANSPORT] if self._exports is None else [nixl.TRANSPORT, stream.TRANSPORT]
        log.info("encode_serving", address=self._address, worker=self._context.worker_id, transports=transports)
        await self._lifecycle.run(
            self._registration,
            log_status_forever(self._loop.activity, self._loop.load),
            num_requests=self._num_requests,
            drain_timeout_s=settings.drain_timeout_s,
            close=partial(server.stop, SERVER_GRACE_S),
        )
        log.info("encode_stopped", exit_code=self._lifecycle.exit_code)

    def _num_requests(self) -> int:
        """What a drain waits for: images that wait to be encoded, and pulls."""
        return self._loop.num_requests

    def _register(self, server: grpc.aio.Server) -> None:
        is_draining = partial(getattr, self._lifecycle, "draining")
        encode = EncodeServicer(self._mailbox, self._make_receiver(), self._engine.fingerprint, is_draining)
        encode.exports = self._exports
        worker = WorkerServicer(
            self._incarnation, self._lifecycle, self._num_requests, RecentAttempts(), SharedEventLog(), self._budgets
        )
        services = ("baton.v1.Encode", "baton.v1.Worker")
        add_standard_services(server, WorkerHealth(self._lifecycle), self._context.trust, services)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
        encode_pb2_grpc.add_EncodeServicer_to_server(encode, server)

    def _make_exports(self) -> EmbeddingExports | None:
        """Raises `LinkBroken` if NIXL is required, or is installed, and cannot start."""
        context = self._context
        if nixl.TRANSPORT not in usable_transports(self._settings.transport.value):
            return None
        exports = EmbeddingExports(context.worker_id, self._incarnation, self._engine.fingerprint, context.trust)
        context.stack.callback(exports.stop)
        return exports

    def _make_receiver(self) -> MediaReceiver:
        engine, held_bytes = self._engine, self._engine.store.max_bytes
        limits = media_limits(engine.config.max_model_len, self._settings.encode_budget_tokens, held_bytes)
        decoder = ImageDecoder(MAX_PIXELS)
        self._context.stack.callback(decoder.close)
        row_bytes = engine.format.row_bytes
        return MediaReceiver(engine.processor, engine.digest, row_bytes, decoder, limits, self._mailbox.try_put)

    def _record(self) -> WorkerRecord:
        engine = self._engine
        return WorkerRecord(
            id=self._context.worker_id,
            role=WorkerRole.ENCODE,
            incarnation=self._incarnation,
            address=self._address,
            model=self._model,
            fingerprint="",
            page_size=0,
            max_model_len=engine.config.max_model_len,
            vocab_size=engine.config.vocab_size,
            status=self._lifecycle.status,
            load=self._loop.load(),
            text_digest=engine.text_digest,
            kernels=engine.device if engine.device != "cpu" else "",
            modalities=(TEXT, IMAGE),
            processor=engine.digest,
            vision=engine.fingerprint,
        )
