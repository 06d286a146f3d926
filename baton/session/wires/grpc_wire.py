"""A wire over one bidirectional gRPC call, `Session.Connect`, on the channels of this process.

A call takes and gives serialised messages, so bytes that cannot be read are an error of the connection, not of gRPC.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.auth_interceptor import SESSION_METHOD
from baton.rpc.call_token import CALL_TOKEN_METADATA_KEY
from baton.rpc.channel import call_token_issuer, open_channel
from baton.rpc.channel_pool import CLIENT_OPTIONS
from baton.rpc.gen import session_pb2 as pb
from baton.session.wires.wire import CONNECT_TIMEOUT_S, ConnectionRefused, Serve

_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
"""Another secret or incarnation; a process that serves no sessions."""

_UNREADABLE = "bytes that are no message"


class GrpcWire:
    """Opens a channel a connection, so that a damaged one is never used again. `trust` gives its TLS identity."""

    def __init__(self, trust: ClusterTrust = OPEN_CLUSTER) -> None:
        self._trust = trust
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self, address: str, incarnation: Incarnation) -> GrpcDialledConnection:
        """See `Wire`."""
        channel = open_channel(address, self._trust, CLIENT_OPTIONS)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await _connected(channel, address)
        except TimeoutError:
            await channel.close()
            raise LinkBroken(f"{address} does not answer") from None
        except BaseException:
            await channel.close()
            raise
        token = call_token_issuer(self._trust, incarnation).issue(SESSION_METHOD, b"")
        call: Any = channel.stream_stream(SESSION_METHOD)(metadata=((CALL_TOKEN_METADATA_KEY, token),))
        return GrpcDialledConnection(channel, call, self._closing)

    async def close(self) -> None:
        """Waits until closed connections are gone."""
        await asyncio.gather(*self._closing, return_exceptions=True)


class GrpcDialledConnection:
    """The dialler's end."""

    wire = "grpc"

    def __init__(self, channel: grpc.aio.Channel, call: Any, closing: set[asyncio.Task[None]]) -> None:
        self._channel = channel
        self._call = call
        self._closing = closing
        self._closed = False

    async def send(self, message: pb.SessionMessage) -> None:
        """See `WireConnection`."""
        if self._closed:
            raise LinkBroken("the connection has ended")
        try:
            await self._call.write(message.SerializeToString())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            _raise_if_refused(error)
            raise LinkBroken(f"the connection has ended: {_status(error)}") from None
        except asyncio.CancelledError:
            self._raise_if_cancelled()
            raise LinkBroken("the connection was closed") from None

    async def receive(self) -> pb.SessionMessage | None:
        """See `WireConnection`."""
        try:
            data = await self._call.read()
            return None if data is grpc.aio.EOF else pb.SessionMessage.FromString(data)
        except DecodeError:
            raise LinkBroken(_UNREADABLE) from None
        except grpc.aio.AioRpcError as error:
            _raise_if_refused(error)
            return None
        except asyncio.InvalidStateError:
            return None
        except asyncio.CancelledError:
            self._raise_if_cancelled()
            return None

    def close(self) -> None:
        """See `WireConnection`."""
        if not self._closed:
            self._closed = True
            self._call.cancel()
            task = asyncio.get_running_loop().create_task(self._channel.close(), name="close-session-channel")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    @staticmethod
    def _raise_if_cancelled() -> None:
        """A cancelled call raises `CancelledError` in its reader; only a cancelled task may pass it on."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


class GrpcServedConnection:
    """The listener's end. Lives as long as the handler of its call."""

    wire = "grpc"

    def __init__(self, context: Any) -> None:
        self._context = context
        self._ended = asyncio.Event()
        self.closed_here = False
        self._handler = asyncio.current_task()
        context.add_done_callback(lambda _: self._ended.set())

    async def send(self, message: pb.SessionMessage) -> None:
        """See `WireConnection`."""
        if self._ended.is_set():
            raise LinkBroken("the connection has ended")
        try:
            await self._context.write(message.SerializeToString())
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise LinkBroken(f"the connection has ended: {_status(error)}") from None

    async def receive(self) -> pb.SessionMessage | None:
        """See `WireConnection`."""
        if self._ended.is_set():
            return None
        try:
            data = await self._context.read()
            return None if data is grpc.aio.EOF else pb.SessionMessage.FromString(data)
        except DecodeError:
            raise LinkBroken(_UNREADABLE) from None
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return None

    def close(self) -> None:
        """See `WireConnection`. Cancels the call's handler, which ends the call."""
        if not self._ended.is_set():
            self._ended.set()
            self.closed_here = True
            if self._handler is not None and self._handler is not asyncio.current_task():
                self._handler.cancel()


class SessionServicer:
    """Serves `Session.Connect`: hands each call to `serve`."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve

    async def Connect(self, requests: object, context: Any) -> None:  # gRPC's name
        """See session.proto."""
        connection = GrpcServedConnection(context)
        try:
            await self._serve(connection)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not connection.closed_here or task is None:
                raise
            task.uncancel()  # gRPC would send no status for a cancelled handler, and the dialler would wait


def add_session_servicer(servicer: SessionServicer, server: grpc.aio.Server) -> None:
    """Adds the service with serialised messages instead of parsed ones."""
    method: Any = grpc.stream_stream_rpc_method_handler(servicer.Connect)
    service, name = SESSION_METHOD[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    server.add_registered_method_handlers(service, {name: method})


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    """Waits for a connection. Raises `LinkBroken` at the first refusal; the dialler decides about another try."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise LinkBroken(f"{address} refuses connections")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


def _raise_if_refused(error: BaseException) -> None:
    if isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSALS:
        raise ConnectionRefused(f"the listener refuses this process: {error.details()}") from None


def _status(error: BaseException) -> str:
    return error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
