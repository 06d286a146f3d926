"""Authentication of a worker's server: covers every method of every service; servicers see only valid calls."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.message_factory import GetMessageClass

from baton.domain.errors import LinkBroken, Overloaded, Superseded, WorkerLost
from baton.domain.ids import AttemptId, Incarnation, RequestId
from baton.domain.trace_context import TraceContext
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc import codec, gen, request_budget
from baton.rpc.auth_interceptor import SESSION_METHOD, UPLOAD_METHODS, AuthInterceptor, Malformed, RejectedCall
from baton.rpc.call_token import CALL_TOKEN_METADATA_KEY, OPEN_CLUSTER_KEY, CallTokenFault, CallTokenIssuer
from baton.rpc.channel import AuthenticatedChannel, with_call_tokens
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import common_pb2, prefill_pb2, prefill_pb2_grpc
from baton.rpc.request_budget import RequestBudget
from baton.rpc.request_metadata import request_metadata
from baton.rpc.server import ServerAuth, start_server

DEADLINE_S = 20.0
WORKER, SUCCESSOR = Incarnation(11), Incarnation(12)
CLUSTER, STRANGER = ClusterTrust(secrets.token_bytes(32)), ClusterTrust(secrets.token_bytes(32))

NAMES = [module.name for module in pkgutil.iter_modules(gen.__path__)]
MODULES = {name: importlib.import_module(f"{gen.__name__}.{name}") for name in NAMES}
SERVICES = {
    service: descriptor
    for module in MODULES.values()
    if hasattr(module, "DESCRIPTOR")
    for service, descriptor in module.DESCRIPTOR.services_by_name.items()
}
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in SERVICES.values()
    for method in service.methods
    if not method.client_streaming  # see `test_session_auth` and `test_upload_auth`
}
ADD = {name: getattr(MODULES[f"{name.lower()}_pb2_grpc"], f"add_{name}Servicer_to_server") for name in SERVICES}


def request_of(method: str) -> bytes:
    """A request that names nothing but the worker's incarnation."""
    request: Any = GetMessageClass(METHODS[method].input_type)()
    if "incarnation" in request.DESCRIPTOR.fields_by_name:
        request.incarnation = WORKER
    return request.SerializeToString()


class RecordingServicers:
    """Serves all methods of all services and records their requests."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.error: Exception | None = None
        self.log_context: dict[str, Any] = {}
        self.hold: asyncio.Event | None = None

    def servicer(self, service: str) -> Any:
        methods = {name: self._serve(m) for name, m in SERVICES[service].methods_by_name.items()}
        return type(service, (), methods)()

    def _serve(self, method: Any) -> Any:
        reply = GetMessageClass(method.output_type)

        async def unary(_: object, request: Any, context: Any) -> Any:
            self._see(request)
            return reply()

        async def stream(_: object, request: Any, context: Any) -> AsyncIterator[Any]:
            self._see(request)
            if self.hold is not None:
                await self.hold.wait()
            yield reply()

        return stream if method.server_streaming else unary

    def _see(self, request: Any) -> None:
        self.seen.append(request)
        self.log_context = structlog.contextvars.get_contextvars()
        if self.error is not None:
            raise self.error


class Rig:
    """A server with an interceptor, and the calls that it rejected."""

    def __init__(
        self, servicers: RecordingServicers, address: str, rejected: list[RejectedCall], interceptor: AuthInterceptor
    ) -> None:
        self.interceptor = interceptor
        self.servicers = servicers
        self.address = address
        self.rejected = rejected

    async def call(self, method: str, trust: ClusterTrust, incarnation: Incarnation = WORKER) -> grpc.StatusCode:
        """The status of a call of `method` with a request that names nothing but the worker's incarnation."""
        async with grpc.aio.insecure_channel(self.address) as plain:
            return await self.ask(with_call_tokens(plain, trust, incarnation), method)

    async def ask(
        self, channel: grpc.aio.Channel | AuthenticatedChannel, method: str, body: bytes | None = None, **options: Any
    ) -> grpc.StatusCode:
        body = request_of(method) if body is None else body
        reply = GetMessageClass(METHODS[method].output_type).FromString
        try:
            if METHODS[method].server_streaming:
                call = channel.unary_stream(method, bytes, reply)
                assert len([event async for event in call(body, timeout=DEADLINE_S, **options)]) == 1
            else:
                await channel.unary_unary(method, bytes, reply)(body, timeout=DEADLINE_S, **options)
        except grpc.aio.AioRpcError as error:
            self.error = error
            return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def rig(trust: ClusterTrust) -> AsyncIterator[Rig]:
    servicers, rejected = RecordingServicers(), list[RejectedCall]()

    def register(server: grpc.aio.Server) -> None:
        for name, add in ADD.items():
            add(servicers.servicer(name), server)

    auth = ServerAuth(WORKER, trust, rejected.append)
    interceptor = auth.interceptor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerAuth, "interceptor", lambda self: interceptor)
        server = await start_server("127.0.0.1", 0, register, auth)
    try:
        yield Rig(servicers, f"127.0.0.1:{server.port}", rejected, interceptor)
    finally:
        await server.stop()


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 20 s")


def test_every_service_is_under_test():
    assert SERVICES.keys() >= {"Decode", "Handoff", "Prefill", "Worker"}
    assert METHODS.keys() >= {"/baton.v1.Handoff/ReadPages", "/baton.v1.Decode/Generate", "/baton.v1.Worker/Drain"}
    all_methods = [f"/{service.full_name}/{m.name}" for service in SERVICES.values() for m in service.methods]
    assert set(all_methods) - METHODS.keys() == {SESSION_METHOD, *UPLOAD_METHODS}


async def test_every_method_rejects_a_faulty_token():
    async with rig(CLUSTER) as worker:
        for method in METHODS:
            for caller in (OPEN_CLUSTER, STRANGER):
                assert await worker.call(method, caller) is grpc.StatusCode.UNAUTHENTICATED
            assert await worker.call(method, CLUSTER, SUCCESSOR) is grpc.StatusCode.UNAUTHENTICATED
        assert worker.servicers.seen == []
        faults = [CallTokenFault.MISSING, CallTokenFault.FORGED, CallTokenFault.OTHER_INCARNATION]
        assert [(rejected.fault, rejected.method) for rejected in worker.rejected] == [
            (f, m) for m in METHODS for f in faults
        ]
        for method in METHODS:
            assert await worker.call(method, CLUSTER) is grpc.StatusCode.OK
        assert len(worker.servicers.seen) == len(METHODS)


async def test_a_replayed_call_is_rejected():
    method = "/baton.v1.Handoff/ReadPages"
    key = CLUSTER.key("call-token")
    assert key is not None
    metadata = ((CALL_TOKEN_METADATA_KEY, CallTokenIssuer(key, WORKER).issue(method, request_of(method))),)
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        assert await worker.ask(plain, method, metadata=metadata) is grpc.StatusCode.OK
        assert await worker.ask(plain, method, metadata=metadata) is grpc.StatusCode.UNAUTHENTICATED
        assert [rejected.fault for rejected in worker.rejected] == [CallTokenFault.REPLAYED]


async def test_concurrent_calls_are_all_accepted():
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        channel = with_call_tokens(plain, CLUSTER, WORKER)
        calls = [worker.ask(channel, "/baton.v1.Decode/Abort") for _ in range(300)]
        assert set(await asyncio.gather(*calls)) == {grpc.StatusCode.OK}


async def test_an_open_cluster_serves_calls_without_a_token():
    async with rig(OPEN_CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        assert await worker.ask(plain, "/baton.v1.Decode/Abort") is grpc.StatusCode.OK
        assert await worker.call("/baton.v1.Decode/Abort", OPEN_CLUSTER) is grpc.StatusCode.OK
        assert worker.rejected == []
        assert await worker.call("/baton.v1.Decode/Abort", OPEN_CLUSTER, SUCCESSOR) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("trust", [OPEN_CLUSTER, CLUSTER], ids=["open", "secret"])
async def test_a_damaged_request_is_a_broken_link(trust: ClusterTrust):
    async with rig(trust) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        for method in METHODS:
            key = trust.key("call-token") or OPEN_CLUSTER_KEY
            token = CallTokenIssuer(key, WORKER).issue(method, common_pb2.AbortRequest(reason="a").SerializeToString())
            damaged = common_pb2.AbortRequest(reason="b").SerializeToString()
            status = await worker.ask(plain, method, damaged, metadata=((CALL_TOKEN_METADATA_KEY, token),))
            assert status is grpc.StatusCode.ABORTED
            assert type(codec.error_from_rpc(worker.error)) is LinkBroken
        assert worker.servicers.seen == []
        assert {rejected.fault for rejected in worker.rejected} == {Malformed.DAMAGED}


NAMED = [name for name, m in METHODS.items() if "incarnation" in m.input_type.fields_by_name and m.name != "Hello"]


@pytest.mark.parametrize("method", NAMED)
async def test_a_request_for_another_incarnation_is_refused(method: str):
    """The field counts even where the token does not name an incarnation."""
    request = GetMessageClass(METHODS[method].input_type)
    async with rig(OPEN_CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        stale = request(incarnation=SUCCESSOR).SerializeToString()
        assert await worker.ask(plain, method, stale) is grpc.StatusCode.ABORTED
        assert type(codec.error_from_rpc(worker.error)) is WorkerLost
        assert await worker.ask(plain, method, b"") is grpc.StatusCode.ABORTED
        assert worker.servicers.seen == []
        meant = request(incarnation=WORKER).SerializeToString()
        assert await worker.ask(plain, method, meant) is grpc.StatusCode.OK
        assert [rejected.fault for rejected in worker.rejected] == [CallTokenFault.OTHER_INCARNATION] * 2


def test_the_methods_that_name_an_incarnation_are_known():
    assert {name.rpartition("/")[2] for name in NAMED} == {
        "Watch",
        "OpenExport",
        "Commit",
        "Renew",
        "ReadPages",
        "Drain",
        "SetBudgets",
        "CacheEvents",
        "PullEmbedding",
        "CommitPull",
    }


@pytest.mark.parametrize("method", METHODS)
async def test_an_unreadable_request_is_a_broken_link(method: str):
    bodies = [b"\xff\xff\xff\xff", b"\x0a\x05abc", b"\x0a\xff\xff\xff\xff\x0f"]  # a tag of nothing, and two pieces
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        for body in bodies:
            status = await worker.ask(with_call_tokens(plain, CLUSTER, WORKER), method, body)
            assert status is grpc.StatusCode.ABORTED
            assert type(codec.error_from_rpc(worker.error)) is LinkBroken
        assert worker.servicers.seen == []
        assert {rejected.fault for rejected in worker.rejected} == {Malformed.MALFORMED}


async def test_a_missing_method_is_unimplemented_and_not_cached():
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        call = plain.unary_unary("/baton.v1.Prefill/Backdoor", bytes, bytes)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_servicers_own_error_keeps_its_name():
    async with rig(CLUSTER) as worker:
        worker.servicers.error = Superseded("too late")
        for method in ("/baton.v1.Decode/Reserve", "/baton.v1.Handoff/Watch"):
            assert await worker.call(method, CLUSTER) is grpc.StatusCode.FAILED_PRECONDITION
            assert isinstance(codec.error_from_rpc(worker.error), Superseded)


async def test_log_lines_of_a_servicer_carry_the_ids_of_the_call():
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        metadata = request_metadata(AttemptId(RequestId("call-1-0"), 3), TraceContext("http-1"))
        for method in METHODS:
            channel = with_call_tokens(plain, CLUSTER, WORKER)
            assert await worker.ask(channel, method, metadata=metadata) is grpc.StatusCode.OK
            expected = {"request_id": "call-1-0", "attempt": 3, "http_request_id": "http-1"}
            assert worker.servicers.log_context == expected
            assert await worker.ask(channel, method) is grpc.StatusCode.OK
            assert worker.servicers.log_context == {}


async def test_a_request_that_is_too_large_is_not_read():
    large = {method: request_budget.max_request_bytes(method) for method in METHODS}
    assert {name for name, size in large.items() if size > 1 << 20} == {
        "/baton.v1.Prefill/Prefill", "/baton.v1.Decode/Generate", "/baton.v1.Decode/Reserve",
        "/baton.v1.Handoff/OpenExport",
    }  # fmt: skip
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        for method, size in large.items():
            status = await worker.ask(with_call_tokens(plain, CLUSTER, WORKER), method, bytes(size + 1))
            assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert worker.servicers.seen == []
        assert {rejected.fault for rejected in worker.rejected} == {Malformed.TOO_LARGE}
        assert await worker.call("/baton.v1.Prefill/Abort", CLUSTER) is grpc.StatusCode.OK


async def test_requests_beyond_the_budget_are_refused_until_calls_end():
    method, size = "/baton.v1.Prefill/Prefill", 1 << 20
    body = prefill_pb2.PrefillRequest(request=common_pb2.EngineRequest(salt="x" * size)).SerializeToString()
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        budget = RequestBudget(3 * size + size // 2)
        worker.interceptor.budget = budget
        worker.servicers.hold = asyncio.Event()
        channel = with_call_tokens(plain, CLUSTER, WORKER)
        held = [asyncio.create_task(worker.ask(channel, method, body)) for _ in range(3)]
        await eventually(lambda: len(worker.servicers.seen) == 3)
        assert await worker.ask(channel, method, body) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert type(codec.error_from_rpc(worker.error)) is Overloaded
        held[0].cancel()  # a caller that goes
        await eventually(lambda: budget.num_bytes < 3 * size)
        worker.servicers.hold.set()
        assert await worker.ask(channel, method, body) is grpc.StatusCode.OK
        assert await asyncio.gather(*held[1:]) == [grpc.StatusCode.OK] * 2
        await eventually(lambda: budget.num_bytes == 0)


@pytest.mark.parametrize(
    "method", ["/baton.v1.Prefill/Prefill", "/baton.v1.Decode/Generate", "/baton.v1.Handoff/Watch"]
)
async def test_a_stream_whose_request_is_cut_short_is_answered(method: str):
    """gRPC itself answers nothing, so the caller would wait until its deadline."""
    key = CLUSTER.key("call-token")
    assert key is not None
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        token = CallTokenIssuer(key, WORKER).issue(method, b"")
        call: Any = plain.stream_stream(method)(metadata=((CALL_TOKEN_METADATA_KEY, token),), timeout=DEADLINE_S)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert type(codec.error_from_rpc(failed.value)) is LinkBroken


async def test_a_call_whose_request_never_comes_gives_its_bytes_back():
    method = "/baton.v1.Prefill/Prefill"
    key = CLUSTER.key("call-token")
    assert key is not None
    async with rig(CLUSTER) as worker, grpc.aio.insecure_channel(worker.address) as plain:
        token = CallTokenIssuer(key, WORKER).issue(method, bytes(1 << 20))
        call: Any = plain.stream_stream(method)(metadata=((CALL_TOKEN_METADATA_KEY, token),), timeout=DEADLINE_S)
        await call.wait_for_connection()
        await eventually(lambda: worker.interceptor.budget.num_bytes == 1 << 20)
        call.cancel()
        await eventually(lambda: worker.interceptor.budget.num_bytes == 0)
        assert worker.servicers.seen == []


async def test_calls_with_another_secret_or_incarnation_are_worker_lost():
    """Maps have no order on the wire, so the token must cover the bytes that are sent."""
    async with rig(CLUSTER) as worker:
        ours, theirs = ChannelPool(CLUSTER), ChannelPool(STRANGER)
        try:
            bias = common_pb2.SamplingParams(logit_bias={n: 1.0 for n in range(200)})
            request = prefill_pb2.PrefillRequest(request=common_pb2.EngineRequest(sampling=bias))
            stub = prefill_pb2_grpc.PrefillStub(ours.get(worker.address, WORKER))
            assert len([event async for event in stub.Prefill(request, timeout=DEADLINE_S)]) == 1
            assert worker.servicers.seen == [request]
            stub = prefill_pb2_grpc.PrefillStub(theirs.get(worker.address, WORKER))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Abort(common_pb2.AbortRequest(), timeout=DEADLINE_S)
            error = codec.error_from_rpc(refused.value)
            assert isinstance(error, WorkerLost)
            assert "cluster secrets of caller and worker differ" in error.log_text
            stub = prefill_pb2_grpc.PrefillStub(ours.get(worker.address, SUCCESSOR))
            with pytest.raises(grpc.aio.AioRpcError, match="earlier incarnation"):
                await stub.Abort(common_pb2.AbortRequest(), timeout=DEADLINE_S)
        finally:
            await asyncio.gather(ours.close(), theirs.close())


async def test_request_streams_are_not_supported():
    async def continuation(_: object) -> Any:
        return grpc.stream_unary_rpc_method_handler(lambda requests, context: b"")

    class Details:
        method = "/x/Y"

    interceptor = ServerAuth(WORKER, OPEN_CLUSTER).interceptor()
    with pytest.raises(NotImplementedError):
        await interceptor.intercept_service(continuation, Details())  # type: ignore[arg-type]
