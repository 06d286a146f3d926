"""Scriptable prefill and decode workers: real gRPC servers in this process that compute nothing.

All attempts on all workers agree on tokens (`speech`). A script is a list of `ScriptedAction`. Every
call, abort and phase is recorded and can be waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from baton.bundled import MODEL_DIR
from baton.domain.ids import AttemptId, Incarnation, ReservationId, WorkerId, new_incarnation
from baton.domain.request import EngineRequest, OutputToken
from baton.domain.worker import (
    ALL_IN_SESSIONS,
    CAPABILITIES,
    TEXT,
    LinkRecord,
    WorkerBudgets,
    WorkerLoad,
    WorkerRecord,
    WorkerRole,
    WorkerStatus,
)
from baton.rpc.codec import (
    decode_id,
    decode_request,
    encode_failure,
    encode_finish,
    encode_id,
    encode_token,
)
from baton.rpc.gen import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.rpc.server import RunningServer, start_server
from baton.rpc.tokens.token_check import set_check
from baton.session.listener import SessionListener
from baton.session.wires.grpc_wire import SessionServicer, add_session_servicer
from baton.settings.text_digest import text_digest
from baton.store.store import WorkerRegistry
from tests.mocks.auth import MockAuth
from tests.mocks.media import MockMedia
from tests.mocks.scores import VOCAB_SIZE as VOCAB_SIZE
from tests.mocks.scores import score_messages
from tests.mocks.scores import scores_of as scores_of
from tests.mocks.script import Action as Action
from tests.mocks.script import Busy as Busy
from tests.mocks.script import Crash as Crash
from tests.mocks.script import Fail as Fail
from tests.mocks.script import Hold as Hold
from tests.mocks.script import Phase as Phase
from tests.mocks.script import ScriptedAction as ScriptedAction
from tests.mocks.script import Skip as Skip
from tests.mocks.sessions import MockSessions, SessionContext
from tests.mocks.speech import Speech
from tests.mocks.speech import token_at as token_at

WAIT_S = 30.0
PAGE_SIZE = 4
MODEL = "mock"
TEXT_DIGEST = text_digest(MODEL_DIR)


class MockWorker:
    """Common parts of both workers: a server, a record, a script, and the calls so far."""

    role: WorkerRole
    proxy_port: int | None = None  # announced instead of the server's own
    budgets: WorkerBudgets
    fingerprint = "mock"
    max_model_len = 200
    text_digest = TEXT_DIGEST
    capabilities: tuple[str, ...] = CAPABILITIES
    modalities: tuple[str, ...] = (TEXT,)
    processor = grammars = ""
    sessions: SessionListener | None = None
    speech = Speech()

    def __init__(self, id: str, script: Sequence[ScriptedAction] = ()) -> None:
        self.id = WorkerId(id)
        self.incarnation: Incarnation = new_incarnation()
        self.script = [replace(action) for action in script]
        self.load = WorkerLoad(available_pages=64, total_pages=64)
        self.status = WorkerStatus.READY
        self.requests: list[EngineRequest] = []
        self.aborts: list[tuple[AttemptId, str]] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self._reached: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self._changed = asyncio.Condition()
        self._released = asyncio.Event()
        self._running: RunningServer | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> None:
        self._auth = MockAuth(self.incarnation)
        self._running = await start_server("127.0.0.1", port, self._register, self._auth)
        if self.sessions is not None:
            await self.in_sessions.port.start()

    def change_incarnation(self) -> None:
        """Becomes another incarnation; open calls stay open."""
        self.incarnation = new_incarnation()
        self._auth.change(self.incarnation)
        if self.sessions is not None:
            self.sessions._acceptor._incarnation = self.incarnation
            self.in_sessions.port.verifier._incarnation = self.incarnation

    async def stop(self) -> None:
        """Ends every call and session at once; idempotent."""
        if self.sessions is not None:
            self.sessions.close()
            await self.in_sessions.port.close()
        if self._running is not None:
            await self._running.stop(0.0)

    def release(self) -> None:
        """Ends all holds, present and future."""
        self._released.set()

    @property
    def port(self) -> int:
        assert self._running is not None
        return self._running.port

    @property
    def session_address(self) -> str:
        """Of the port of sessions, or of its proxy; "" behind a proxy of the gRPC port alone, which they would pass."""
        return "" if self.sessions is None else self.in_sessions.address(behind_proxy=self.proxy_port is not None)

    def record(self, links: Sequence[LinkRecord] = ()) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            role=self.role,
            incarnation=self.incarnation,
            address=f"127.0.0.1:{self.proxy_port or self.port}",
            model=MODEL,
            fingerprint=self.fingerprint,
            page_size=PAGE_SIZE,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            status=self.status,
            load=self.load,
            links=tuple(links),
            budgets=self.budgets,
            text_digest=self.text_digest,
            capabilities=self.capabilities,
            modalities=self.modalities,
            processor=self.processor,
            grammars=self.grammars,
            session_address=self.session_address,
        )

    async def reached(self, phase: Phase, times: int = 1) -> None:
        """Waits until a phase was reached this often."""
        await self._wait_for(lambda: self._reached[phase] >= times)

    async def aborted(self, id: AttemptId, within_s: float = WAIT_S) -> str:
        """Waits for the abort of an attempt; returns its reason."""
        await self._wait_for(lambda: any(aborted == id for aborted, _ in self.aborts), within_s)
        return next(reason for aborted, reason in self.aborts if aborted == id)

    async def Abort(  # gRPC's name
        self, message: common_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.AbortReply:
        async with self._changed:
            self.aborts.append((decode_id(message.id), message.reason))
            self._changed.notify_all()
        return common_pb2.AbortReply()

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def _listen(self, server: grpc.aio.Server) -> None:
        self.in_sessions = MockSessions(self, self.incarnation)
        self.sessions = self.in_sessions.listener
        add_session_servicer(SessionServicer(self.sessions.serve), server)

    async def _wait_for(self, condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(condition)

    async def _run_action(self, phase: Phase, index: int | None = None) -> Action | None:
        """Records the phase; performs Hold and Crash, returns other actions to the caller."""
        async with self._changed:
            self._reached[phase] += 1
            self._changed.notify_all()
        action = self._next_action(phase, index)
        if isinstance(action, Crash):
            if self.sessions is not None:
                await self.in_sessions.all_sent()
            self._stopping = asyncio.create_task(self.stop())
        if isinstance(action, Crash | Hold):
            await self._released.wait()  # or until the call is cancelled
        return action

    def _next_action(self, phase: Phase, index: int | None) -> Action | None:
        for at in self.script:
            if at.phase is phase and at.times > 0 and at.index in (None, index):
                at.times -= 1
                return at.action
        return None


class MockPrefill(MockWorker, prefill_pb2_grpc.PrefillServicer):
    """Accepts, seals with the next token, ends."""

    role = WorkerRole.PREFILL
    budgets = WorkerBudgets(prefill_tokens=512)
    capabilities: tuple[str, ...] = (*CAPABILITIES, *ALL_IN_SESSIONS)
    num_cached_tokens = 0
    lost_scores: frozenset[int] = frozenset()  # numbers of the messages that are not sent

    def __init__(self, id: str, script: Sequence[ScriptedAction] = ()) -> None:
        super().__init__(id, script)
        self.media = MockMedia()

    async def PutMedia(  # gRPC's name
        self,
        requests: AsyncIterator[prefill_pb2.PutMediaRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> prefill_pb2.PutMediaResponse:
        return await self.media.put(requests, context)

    def _register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        self._listen(server)

    async def Prefill(  # gRPC's name
        self, message: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        request = decode_request(message.request)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if (missing := self.media.missing(request)) is not None:
            yield prefill_pb2.PrefillEvent(failed=encode_failure(missing))
            return
        scores = [prefill_pb2.PrefillEvent(scores=message) for message in score_messages(request)]
        for phase, event in (
            (Phase.ACCEPT, prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())),
            *((Phase.SCORE, event) for index, event in enumerate(scores) if index not in self.lost_scores),
            (Phase.SEAL, prefill_pb2.PrefillEvent(sealed=self._sealed(request))),
        ):
            action = await self._run_action(phase)
            if isinstance(action, Fail):
                yield prefill_pb2.PrefillEvent(failed=failure(action))
                return
            yield event
        await self._run_action(Phase.SEALED)

    def _sealed(self, request: EngineRequest) -> prefill_pb2.Sealed:
        index = request.num_emitted
        sealed = prefill_pb2.Sealed(
            first_token=encode_token(OutputToken(index, self.speech.token(request, index))),
            finish_reason=encode_finish(self.speech.finish(request, index)),
            num_cached_tokens=self.num_cached_tokens,
        )
        set_check(sealed)
        return sealed


class MockDecode(MockWorker, decode_pb2_grpc.DecodeServicer):
    """Reserves, imports at once, and sends one token a message."""

    role = WorkerRole.DECODE
    budgets = WorkerBudgets(rows=8)
    capabilities: tuple[str, ...] = (*CAPABILITIES, *ALL_IN_SESSIONS)
    decode_prefix_len = 0

    def __init__(self, id: str, script: Sequence[ScriptedAction] = ()) -> None:
        super().__init__(id, script)
        self.reservations: list[decode_pb2.ReserveRequest] = []
        self.generates: list[decode_pb2.GenerateRequest] = []
        self.num_generating = self.num_in_sessions = 0

    def _register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        self._listen(server)

    async def Reserve(  # gRPC's name
        self, message: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveReply:
        self.reservations.append(message)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        match await self._run_action(Phase.RESERVE):
            case Busy(retry_after_s, no_prompts):
                return decode_pb2.ReserveReply(busy=decode_pb2.Busy(retry_after_s=retry_after_s, no_prompts=no_prompts))
            case Fail() as fail:
                return decode_pb2.ReserveReply(refused=failure(fail))
        reservation_id = ReservationId(f"{self.id}-{len(self.reservations)}")
        reserved = decode_pb2.Reserved(reservation_id=reservation_id, decode_prefix_len=self.decode_prefix_len)
        return decode_pb2.ReserveReply(reserved=reserved)

    async def Generate(  # gRPC's name
        self, message: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        self.num_generating += 1
        self.num_in_sessions += isinstance(context, SessionContext)
        try:
            async for event in self._generate(message, context):
                yield event
        finally:
            self.num_generating -= 1

    async def _generate(
        self, message: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        request = decode_request(message.request)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.generates.append(message)
        action = await self._run_action(Phase.IMPORT)
        if isinstance(action, Fail):
            yield decode_pb2.GenerateEvent(failed=failure(action))
            return
        local = message.prefill_incarnation == self.incarnation
        if not local:
            index = request.num_emitted
            first = encode_token(OutputToken(index, self.speech.token(request, index)))
            times = common_pb2.ImportTimes(bytes=1, pages=1)
            yield decode_pb2.GenerateEvent(imported=decode_pb2.Imported(times=times, first_token=first))
        for scores in score_messages(request) if local else ():
            yield decode_pb2.GenerateEvent(scores=scores)
        for index in range(request.num_emitted + (not local), request.stop.max_tokens):
            action = await self._run_action(Phase.DECODE, index)
            if isinstance(action, Fail):
                yield decode_pb2.GenerateEvent(failed=failure(action))
                return
            if not isinstance(action, Skip):
                yield self._tokens(request, index)
            if self.speech.finish(request, index) is not None:
                return

    def _tokens(self, request: EngineRequest, index: int) -> decode_pb2.GenerateEvent:
        token = encode_token(OutputToken(index, self.speech.token(request, index)))
        finish = encode_finish(self.speech.finish(request, index))
        message = decode_pb2.Tokens(tokens=[token], finish_reason=finish)
        set_check(message)
        return decode_pb2.GenerateEvent(tokens=message)


def failure(action: Fail) -> common_pb2.Failure:
    seen = None if action.seen is None else encode_id(action.seen)
    return common_pb2.Failure(code=action.code, message="scripted", seen=seen)


@dataclass(slots=True)
class MockCluster:
    """Workers and their registrations; every decode worker has a link to every prefill worker."""

    registry: WorkerRegistry
    prefills: list[MockPrefill] = field(default_factory=list)
    decodes: list[MockDecode] = field(default_factory=list)
    num_probe_bytes: int = 4096
    text_digest: str = TEXT_DIGEST
    announced: dict[WorkerId, Incarnation] = field(default_factory=dict)

    @property
    def workers(self) -> list[MockWorker]:
        return [*self.prefills, *self.decodes]

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start()
        await self.announce()

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def announce(self) -> None:
        """Registers every worker, or refreshes its record."""
        links = [
            LinkRecord(prefill.id, prefill.incarnation, "stream", 1e9, self.num_probe_bytes)
            for prefill in self.prefills
        ]
        for worker in self.workers:
            worker.text_digest = self.text_digest
        for worker in self.workers:
            before = self.announced.get(worker.id, worker.incarnation)
            if before != worker.incarnation:  # restarted: the store keeps the id for the earlier process
                await self.registry.withdraw(worker.id, before)
            self.announced[worker.id] = worker.incarnation
        for prefill in self.prefills:
            await self.registry.announce(prefill.record())
        for decode in self.decodes:
            await self.registry.announce(decode.record(links))

    async def change_load(self, worker: MockWorker, **load: Any) -> None:
        """Changes parts of a worker's load and registers it."""
        worker.load = replace(worker.load, **load)
        await self.announce()

    async def change_budgets(self, worker: MockWorker, **budgets: Any) -> None:
        """Changes some of a worker's budgets and registers it."""
        worker.budgets = replace(worker.budgets, **budgets)
        await self.announce()
