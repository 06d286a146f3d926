"""gRPC over the simulated network: the product's stubs and servicers meet here, with real messages as bytes.

`SimChannels` replaces `baton.rpc.channel_pool.ChannelPool`, `SimServer` collects registered servicers.
Errors are those of grpc.aio: a broken connection is UNAVAILABLE, a closed channel cancels its calls, a cancelled call
ends its handler. A duplicated call runs its handler a second time, later, and discards its replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from baton.domain.errors import BatonError, WorkerLost
from baton.domain.ids import AttemptId, Incarnation
from baton.rpc.channel_pool import ChannelPool, Stub
from baton.rpc.codec import rpc_error
from baton.rpc.incarnation_check import check_incarnation
from baton.rpc.reply_channel import ReplyChannel
from baton.rpc.request_metadata import Metadata
from simulation.runtime.attempt_ids import attempt_of
from simulation.runtime.network import Endpoint, SimNetwork
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import BROKE

TICK_S = 1e-6
DUPLICATE_TIMEOUT_S = 1.0
"""Time limit of a duplicate's handler."""


class SimServer:
    """The part of a server that `add_*Servicer_to_server` uses."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: the registered handlers below are the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class SimChannels(ChannelPool):
    """ChannelPool of one process."""

    def __init__(self, network: SimNetwork, process: SimProcess) -> None:
        super().__init__()
        self._network = network
        self._process = process
        self._channels: dict[tuple[str, Incarnation], _Channel] = {}

    def get(self, address: str, incarnation: Incarnation) -> ReplyChannel:
        channel = self._channels.get((address, incarnation))
        if channel is None:
            channel = self._channels[address, incarnation] = _Channel(self._network, self._process, address)
        return ReplyChannel(_StubChannel(channel, incarnation))

    def stub(self, kind: Callable[[Any], Stub], address: str, incarnation: Incarnation) -> Stub:
        return kind(self.get(address, incarnation))

    async def forget(self, address: str, incarnation: Incarnation) -> None:
        channel = self._channels.pop((address, incarnation), None)
        if channel is not None:
            channel.close()

    async def close(self) -> None:
        for peer in list(self._channels):
            await self.forget(*peer)


class _Channel:
    """A connection, with its open calls."""

    def __init__(self, network: SimNetwork, process: SimProcess, address: str) -> None:
        self.network = network
        self.process = process
        self.address = address
        self.calls: dict[SimCall, None] = {}

    def close(self) -> None:
        for call in list(self.calls):
            call.cancel()


class _StubChannel:
    """The part of grpc.aio.Channel that stubs use. Stands for call tokens, too: other incarnations refuse its calls."""

    def __init__(self, channel: _Channel, incarnation: Incarnation) -> None:
        self.channel = channel
        self.incarnation = incarnation

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool
    ) -> Callable[..., Any]:
        async def invoke(message: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            call = self._call(method, message, request_serializer(message), timeout, metadata)
            answer = await call.receive()
            if answer is None:
                raise _error(grpc.StatusCode.UNKNOWN, "no answer")
            return response_deserializer(answer)

        return invoke

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool
    ) -> Callable[..., Any]:
        def invoke(message: Any, timeout: float | None = None, metadata: Any = None) -> _Stream:
            call = self._call(method, message, request_serializer(message), timeout, metadata)
            return _Stream(call, response_deserializer)

        return invoke

    def stream_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool
    ) -> Callable[..., Any]:
        async def invoke(messages: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            first, *rest = messages
            call = self._call(method, first, request_serializer(first), timeout, metadata)
            call.rest = [request_serializer(message) for message in rest]
            answer = await call.receive()
            if answer is None:
                raise _error(grpc.StatusCode.UNKNOWN, "no answer")
            return response_deserializer(answer)

        return invoke

    def _call(self, method: str, message: Any, request: bytes, timeout: float | None, metadata: Any) -> SimCall:
        return SimCall(self, method, message, request, timeout, metadata)


class _Stream:
    """The part of grpc.aio.UnaryStreamCall that is used."""

    def __init__(self, call: SimCall, deserialize: Callable[[bytes], Any]) -> None:
        self._call = call
        self._deserialize = deserialize
        self.cancel = call.cancel

    async def read(self) -> Any:
        data = await self._call.receive()
        return grpc.aio.EOF if data is None else self._deserialize(data)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (data := await self._call.receive()) is not None:
            yield self._deserialize(data)


class _AbortedCall(Exception):
    """A servicer has ended its call with `error`."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(str(error))
        self.error = error


class _Context:
    """The part of grpc.aio.ServicerContext that servicers use, for one handler. `until_s`: the call's time limit."""

    def __init__(self, metadata: Metadata, until_s: float | None) -> None:
        self._metadata = metadata
        self._until_s = until_s
        self.go_ahead = asyncio.Event()

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - asyncio.get_running_loop().time())

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self.go_ahead.set()

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        raise _AbortedCall(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details))


class SimCall:
    """One RPC, seen from its client, and the handler that serves it."""

    def __init__(
        self,
        caller: _StubChannel,
        method: str,
        message: Any,
        request: bytes,
        timeout_s: float | None,
        metadata: Metadata | None,
    ) -> None:
        self._channel = channel = caller.channel
        self._incarnation = caller.incarnation
        self._network = channel.network
        self._link = channel.network.link(channel.process.name, channel.address)
        self._method = method
        self._request = request
        self._metadata = metadata or ()
        self.rest: list[bytes] = []
        """Further requests of a stream, sent once the server asks for them."""
        self._id: AttemptId | None = attempt_of(message)
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes | grpc.aio.AioRpcError | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False  # for the client: nothing more arrives
        self._cancelled = False
        self._serving: asyncio.Task[None] | None = None
        self._last_arrival_s = 0.0
        self._until_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._deadline)
        channel.calls[self] = None
        self._link.calls[self] = None
        self._start()

    async def receive(self) -> bytes | None:
        """The next answer; None at the end. Raises `AioRpcError`, or `CancelledError` once the call was cancelled."""
        while not self._inbox:
            if self._cancelled:
                raise asyncio.CancelledError
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        item = self._inbox.popleft()
        if isinstance(item, grpc.aio.AioRpcError):
            raise item
        return item

    def cancel(self) -> None:
        """Cancels the call; the server is notified after the delay."""
        if not self._ended:
            self._cancelled = True
            self._inbox.clear()
            self._end(None)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.cancel()

    def on_connection_lost(self, why: str) -> None:
        """Breaks the connection at both ends."""
        self._fail(grpc.StatusCode.UNAVAILABLE, why)

    def _start(self) -> None:
        now = self._loop.time()
        at = self._link.arrival(self._channel.process.name, now)
        if at is None:
            self._loop.call_later(self._delay_s(), self.on_connection_lost, BROKE)
            return
        self._note("->")
        self._loop.call_at(at, self._arrive)
        duplicate_at = self._link.duplicate_arrival(at)
        if duplicate_at is not None:
            self._loop.call_at(duplicate_at, self._arrive_duplicate)

    def _host(self) -> Endpoint | None:
        host = self._network.hosts.get(self._channel.address)
        return host if host is not None and host.listens else None

    def _arrive(self) -> None:
        host = self._host()
        if host is None:
            self._loop.call_later(self._delay_s(), self.on_connection_lost, "connection refused")
            return
        self._serving = host.process.spawn(self._serve(host), f"{self._method} {self._id}")
        host.add_call(self._serving)
        if self._ended:
            self._loop.call_later(self._delay_s(), self._serving.cancel)

    def _arrive_duplicate(self) -> None:
        host = self._host()
        if host is not None and not self._link.is_cut(self._channel.process.name, self._loop.time()):
            self._note("=>")
            duplicate = host.process.spawn(
                self._answer(host, lambda data: None), f"duplicate {self._method} {self._id}"
            )
            host.add_call(duplicate)
            self._loop.call_later(DUPLICATE_TIMEOUT_S, duplicate.cancel)

    async def _serve(self, host: Endpoint) -> None:
        await self._answer(host, lambda data: self._send(host, data))

    async def _answer(self, host: Endpoint, send: Callable[[bytes | grpc.aio.AioRpcError | None], None]) -> None:
        handler, context = host.handlers[self._method], _Context(self._metadata, self._until_s)
        message = handler.request_deserializer(self._request)
        try:
            if self._incarnation != host.process.incarnation:
                raise WorkerLost("the call's token is for an earlier incarnation of this worker")
            check_incarnation(message, host.process.incarnation)
            if handler.response_streaming:
                async with aclosing(handler.unary_stream(message, context)) as events:
                    async for event in events:
                        send(handler.response_serializer(event))
            elif handler.request_streaming:
                async with aclosing(self._requests(message, handler.request_deserializer, context)) as messages:
                    send(handler.response_serializer(await handler.stream_unary(messages, context)))
            else:
                send(handler.response_serializer(await handler.unary_unary(message, context)))
            send(None)
        except BatonError as error:  # what `AuthInterceptor` makes of it
            send(rpc_error(error))
        except _AbortedCall as ended:
            send(ended.error)

    async def _requests(
        self, first: Any, deserialize: Callable[[bytes], Any], context: _Context
    ) -> AsyncGenerator[Any, None]:
        """The requests of a stream as they arrive. A lost one breaks the connection, and the handler with it."""
        yield first
        await context.go_ahead.wait()
        for request in self.rest:
            now = self._loop.time()
            at = self._link.arrival(self._channel.process.name, now + self._delay_s())
            if at is None:
                self.on_connection_lost(BROKE)
                raise asyncio.CancelledError
            await asyncio.sleep(at - now)
            yield deserialize(request)

    def _send(self, host: Endpoint, item: bytes | grpc.aio.AioRpcError | None) -> None:
        if self._ended or not host.process.alive:
            return
        at = self._link.arrival(self._channel.address, self._loop.time())
        if at is None:
            self.on_connection_lost(BROKE)
            return
        # Strictly later: timers of the same instant go off in no order.
        self._last_arrival_s = max(at, self._last_arrival_s + TICK_S)
        self._loop.call_at(self._last_arrival_s, self._deliver, item)

    def _deliver(self, item: bytes | grpc.aio.AioRpcError | None) -> None:
        if not self._ended:
            self._inbox.append(item)
            if not isinstance(item, bytes):
                self._end(None)
            self._wake()

    def _deadline(self) -> None:
        self._fail(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline")

    def _fail(self, code: grpc.StatusCode, why: str) -> None:
        if not self._ended:
            self._note("-x", f" {why}")
            self._inbox.append(_error(code, why))
            self._end(why)
            self._wake()

    def _end(self, why: str | None) -> None:
        self._ended = True
        self._channel.calls.pop(self, None)
        self._link.calls.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._serving is not None and not self._serving.done():
            self._loop.call_later(self._delay_s(), self._serving.cancel)

    def _delay_s(self) -> float:
        return self._link.delay_s(self._loop.time())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _note(self, arrow: str, more: str = "") -> None:
        place = f"{self._channel.process.name}{arrow}{self._channel.address}"
        what = f"{self._method.rpartition('/')[2]} {self._id or ''}{more}"
        self._network.trace.note(place, what, self._id.request_id if self._id else None)


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
