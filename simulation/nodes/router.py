"""A simulated router: both halves of the real one, without a socket. Wired as `baton.services.router.app` wires them.

Clients call `post` and `resume`, like the routes of `baton.services.router.routes` with a raw request; the response is
an ASGI application. `leave` is the end of `baton.services.router.app.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from baton.domain.ids import Incarnation, OwnerId, RequestId
from baton.domain.worker import WorkerRecord
from baton.rpc.codec import decode_id
from baton.rpc.gen import decode_pb2, prefill_pb2
from baton.rpc.request_metadata import Metadata
from baton.services.router.admission.admission_queue import AdmissionLimits
from baton.services.router.admission.slot import SLOT_BYTES
from baton.services.router.dispatch.aborts import Aborts
from baton.services.router.dispatch.dispatcher import DispatchLimits, RouterIdentity
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter
from baton.services.router.dispatch.reserve import ReserveLimits
from baton.services.router.dispatch.sessions.session_stream import SessionStream
from baton.services.router.dispatch.sessions.worker_sessions import WorkerSessions
from baton.services.router.dispatch.workers import WorkerLimits, WorkerSet
from baton.services.router.frontend import ApiLimits, StoreAccess, build_frontend
from baton.services.router.openai.request_parser import RawRequest
from baton.services.router.respond import GenerationResponse
from baton.services.router.takeover.call_media import CallMedia
from baton.services.router.takeover.loss_watcher import LossWatcher
from baton.services.router.takeover.supersede_listener import SupersedeListener
from baton.store.ownership import StoreReset, patience_s
from baton.telemetry.request_timer import RequestOrigin
from baton.telemetry.request_traces import RequestLog, RequestTraces
from simulation.checks.invariants import Violation
from simulation.clients.text_model import text_model
from simulation.nodes.state_store import SimMediaFiles, SimStore, StoreServer
from simulation.policies import CONFIG, MODEL, PolicyClasses
from simulation.runtime.grpc_calls import SimChannels
from simulation.runtime.network import Endpoint, SimNetwork
from simulation.runtime.process import SimProcess
from simulation.runtime.session_ports import sim_wires
from simulation.runtime.session_wire import SimWire
from simulation.scenario import MAX_CHOICES, Scenario

ADMISSION = AdmissionLimits(max_running_requests=6, max_queued_bytes=8 * SLOT_BYTES)
LIMITS = DispatchLimits(ADMISSION, ReserveLimits(CONFIG.reserve_timeout_s, CONFIG.patience_s), CONFIG.max_attempts)
LAST_WORDS_S = 1.0
"""As in `baton.services.router.app`."""


@dataclass(frozen=True)
class _OrderedListener:
    """A listener that hashes by its number, so sets of them have the same order in every run."""

    number: int
    call: Callable[[], None]

    def __hash__(self) -> int:
        return self.number

    def __call__(self) -> None:
        self.call()


class SimWorkerSet(WorkerSet):
    """The real worker set, with a fixed order of listeners."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._numbers = itertools.count()

    def watch(self, incarnation: Incarnation, on_lost: Callable[[], None]) -> Callable[[], None]:
        return super().watch(incarnation, _OrderedListener(next(self._numbers), on_lost))


class SimSessions(WorkerSessions):
    """The real sessions. The trace names the workers that are asked, as it does for calls: see `silence`."""

    def __init__(self, network: SimNetwork, process: SimProcess) -> None:
        name = process.name
        super().__init__(SimWire(network, process), f"{name}/{process.incarnation:x}", process.incarnation)
        self._wires = sim_wires(network, process)
        self._note = network.trace.note
        self._name = name

    def reserve(self, worker: WorkerRecord, request: decode_pb2.ReserveRequest, metadata: Metadata) -> SessionStream:
        id = decode_id(request.id)
        self._note(f"{self._name}->{worker.address}", f"reserve {id}", id.request_id)
        return super().reserve(worker, request, metadata)

    def prefill(self, worker: WorkerRecord, request: prefill_pb2.PrefillRequest, metadata: Metadata) -> SessionStream:
        id = decode_id(request.request.id)
        self._note(f"{self._name}->{worker.address}", f"prefill {id}", id.request_id)
        return super().prefill(worker, request, metadata)


class SimRouter:
    """One life of a router. Created inside its own process. `host` holds the connections of its clients."""

    def __init__(
        self, process: SimProcess, network: SimNetwork, store_server: StoreServer, policies: PolicyClasses,
        scenario: Scenario, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.process = process
        self.host = Endpoint(process, {})
        sim_store = SimStore(store_server, network, process, CONFIG.heartbeat_s)
        max_tpot_s = 2 * scenario.mean_step_s if scenario.fits else math.inf
        limits = WorkerLimits(CONFIG.worker_ttl_s, CONFIG.heartbeat_s, CONFIG.max_step_age_s, max_tpot_s=max_tpot_s)
        self._workers = SimWorkerSet(sim_store, SimChannels(network, process), WorkerFilter(MODEL), limits, clock=clock)
        if scenario.sessions:
            self._workers.worker_sessions = SimSessions(network, process)
        self._aborts = Aborts(self._workers)
        supersede_listener = policies.supersede_listener()
        self.writer = policies.writer(sim_store, on_superseded=supersede_listener.on_superseded)
        self.writer.start()
        identity = RouterIdentity(process.name, MODEL)
        self.dispatcher = policies.dispatcher(self._workers, self._aborts, self.writer, identity, LIMITS)
        self._media = CallMedia(SimMediaFiles(store_server, sim_store))
        self._build_api(sim_store, supersede_listener, policies, scenario.deadline_s)
        watching = self._workers.start()

        async def watch_workers() -> None:
            await watching

        process.spawn(watch_workers(), "workers")

    async def listen(self) -> None:
        """Returns when it accepts connections, as `baton.services.router.app.run` does after its first reading."""
        await self._workers.wait_for_first_read()

    async def post(self, raw_request: RawRequest) -> Response:
        """The answer to a new call. Raises `BatonError`."""
        self.dispatcher.refuse_if_full(self._deadline_s, raw_request.metadata.tenant)
        parsed = await self._frontend.parser.parse(raw_request)
        timer = self._frontend.traces.start(RequestOrigin(raw_request.endpoint), asyncio.get_running_loop().time())
        request = parsed.request
        timer.begin(request.id, len(request.sequences), request.num_prompt_tokens, stream=True)
        answer = GenerationResponse(self._frontend.response_context, parsed, raw_request, timer)
        self._check_admission()
        return answer

    async def resume(self, id: RequestId, last_event_id: str, tenant: str = "") -> Response:
        """The rest of an earlier answer of that tenant. Raises `BatonError`."""
        return await self._frontend.resumer.respond(id, last_event_id, tenant)

    async def leave(self) -> None:
        """SIGTERM; returns when the process would exit."""
        self._ownership.stop_claiming()
        self._frontend.takeovers.drain()
        self.dispatcher.drain()
        await self._until_empty(CONFIG.drain_s)
        await self.host.stop(LAST_WORDS_S)
        await self._frontend.takeovers.close()
        if self._workers.worker_sessions is not None:
            await self._workers.worker_sessions.close()
        await self._until_empty(LAST_WORDS_S)
        await self.writer.flush(LAST_WORDS_S)
        await self._ownership.close()
        await self._aborts.close()
        await self._media.close()
        await self.writer.close()

    def check_idle(self) -> None:
        """Raises `Violation` if an admitted request is open, or the store misses a record."""
        if self.dispatcher.num_open:
            raise Violation("I9", f"{self.dispatcher.num_open} requests were never released")
        if self.writer.num_pending:
            raise Violation("I9", f"{self.writer.num_pending} requests were never written to their end")

    def _build_api(
        self, store: SimStore, supersede_listener: SupersedeListener, policies: PolicyClasses, deadline_s: float
    ) -> None:
        owner = OwnerId(f"{self.process.name}/{self.process.incarnation:x}")
        limits = ApiLimits(MODEL, CONFIG.max_model_len, request_deadline_s=deadline_s)
        losses = LossWatcher(patience_s(CONFIG.owner_ttl_s), asyncio.get_running_loop().time)
        store_access = StoreAccess(
            store, self.writer, owner, supersede_listener, owner_ttl_s=CONFIG.owner_ttl_s, losses=losses,
            media=self._media,
        )  # fmt: skip

        def on_reset(reset: StoreReset) -> None:
            losses.note()
            self.writer.put_again()
            self._media.put_again()

        self._deadline_s = deadline_s
        traces = RequestTraces(self.process.name, MODEL, RequestLog.OFF)
        self._frontend = build_frontend(text_model(), self.dispatcher, limits, traces, store_access)
        self._ownership = policies.ownership(
            store,
            owner,
            self._frontend.takeovers.take_over,
            on_reset=on_reset,
            owner_ttl_s=CONFIG.owner_ttl_s,
            clock=asyncio.get_running_loop().time,
        )
        self._frontend.takeovers.follow(self._ownership)
        losses.follow(self._ownership.wait_for_renewal)
        self._ownership.start()

    async def _until_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.dispatcher.wait_empty()

    def _check_admission(self) -> None:
        """Checks after an admission that no more requests than the limits are here, besides those taken over.

        A full queue admits a request of another tenant than the one that holds the most of it, and that one's newest
        request leaves; it is here until its task has run.
        """
        num_takeovers = MAX_CHOICES * sum(name.startswith("takeover-") for name in self.process.tasks())
        limit = ADMISSION.max_running_requests + ADMISSION.max_queued_bytes // SLOT_BYTES + num_takeovers
        num_here = sum(tracked.slot.refusal is None for tracked in self.dispatcher.tracked())
        if num_here > limit:
            raise Violation("admission", f"{num_here} requests are admitted, {limit} at most may be")
