"""A process between callers and a worker: it passes calls on and changes replies. It does not hold the secret."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

Change = Callable[[str, list[bytes]], list[bytes]]
"""What callers get in place of a method's replies."""

HOP_KEYS = ("user-agent", "grpc-", ":")
CALL_TIMEOUT_S = 20.0


class _Relay(grpc.GenericRpcHandler):
    """Callers of methods in `streams` get a stream of replies. Streams of requests are not passed on."""

    def __init__(self, worker: Any, streams: Callable[[str], bool], change: Change) -> None:
        self._worker = worker
        self._streams = streams
        self._change = change

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        method = str(call.method)
        metadata = tuple((key, value) for key, value in call.invocation_metadata or () if not key.startswith(HOP_KEYS))

        async def unary(request: bytes, context: Any) -> bytes:
            reply = await self._worker.unary_unary(method)(request, metadata=metadata, timeout=CALL_TIMEOUT_S)
            return self._change(method, [reply])[0]

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            call = self._worker.unary_stream(method)(request, metadata=metadata, timeout=CALL_TIMEOUT_S)
            replies = [reply async for reply in call]
            for reply in self._change(method, replies):
                yield reply

        if self._streams(method):
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@asynccontextmanager
async def relay(port: int, streams: Callable[[str], bool], change: Change) -> AsyncIterator[int]:
    """Yields the port of a relay to the worker on `port`."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as worker:
        server = grpc.aio.server(handlers=(_Relay(worker, streams, change),))
        bound = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield bound
        finally:
            await server.stop(None)
