"""Reads the replies of calls: a reply that cannot be read fails its call with `link_broken`.

`ChannelPool` puts it around every channel. gRPC Python would pass on None instead of a message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any, NoReturn

from baton.rpc import codec
from baton.rpc.codec import Unreadable


class ReplyChannel:
    """The part of a `grpc.aio.Channel` that stubs use. `channel` opens the calls; its opener closes it."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Callable[..., Any]:
        """As in `grpc.aio.Channel`."""
        call = self._channel.unary_unary(method, request_serializer, _reader(response_deserializer), **options)
        return lambda *arguments, **named: UnaryReply(call(*arguments, **named))

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Callable[..., Any]:
        """As in `grpc.aio.Channel`."""
        call = self._channel.unary_stream(method, request_serializer, _reader(response_deserializer), **options)
        return lambda *arguments, **named: ReplyStream(call(*arguments, **named))


class UnaryReply:
    """A call with one reply, which `await` returns."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, Any]:
        reply = yield from self._call.__await__()
        if isinstance(reply, Unreadable):
            raise codec.rpc_error(reply.error)
        return reply


class ReplyStream:
    """A call with a stream of replies, for `read` or for iteration. An unreadable reply cancels it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    async def read(self) -> Any:
        """The next reply; `grpc.aio.EOF` at the end. Raises `AioRpcError`."""
        reply = await self._call.read()
        if isinstance(reply, Unreadable):
            self._fail(reply)
        return reply

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for reply in self._call:
            if isinstance(reply, Unreadable):
                self._fail(reply)
            yield reply

    def _fail(self, reply: Unreadable) -> NoReturn:
        self.cancel()
        raise codec.rpc_error(reply.error)


def _reader(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    return None if parse is None else partial(codec.read, parse)
