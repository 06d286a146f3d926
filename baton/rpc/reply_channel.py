"""Reads the replies of calls: one that cannot be read, or is not the worker's, fails its call with `link_broken`.

`ChannelPool` puts it around every channel, and learns of failures that point to a damaged connection. gRPC Python would
pass on None instead of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any, NoReturn

import grpc
import structlog

from baton.rpc import codec
from baton.rpc.channel import may_be_damaged
from baton.rpc.codec import Unreadable
from baton.rpc.replies.reply_tags import UNTAGGED_METHODS, ReplyTags, has_tag

log = structlog.get_logger(__name__)

TIMER_SLACK_S = 0.05
"""A call's time limit may fire this much before this clock shows it."""


class ReplyChannel:
    """The part of a `grpc.aio.Channel` that stubs use. `channel` opens the calls; its opener closes it.

    `on_open` gets every call. `on_damaged` runs after a failure that the connection may be the cause of. `key`: that of
    the tags that replies must have; None: they have none.
    """

    def __init__(
        self,
        channel: Any,
        on_open: Callable[[Any], None] = lambda call: None,
        on_damaged: Callable[[], None] = lambda: None,
        key: bytes | None = None,
    ) -> None:
        self._channel = channel
        self._on_open = on_open
        self._on_damaged = on_damaged
        self._key = key

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Callable[..., Any]:
        """As in `grpc.aio.Channel`."""
        opener = self._channel.unary_unary
        return self._prepare(UnaryReply, opener, method, request_serializer, response_deserializer, options)

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Callable[..., Any]:
        """As in `grpc.aio.Channel`."""
        opener = self._channel.unary_stream
        return self._prepare(ReplyStream, opener, method, request_serializer, response_deserializer, options)

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Callable[..., Any]:
        """As in `grpc.aio.Channel`; the result is called with an iterable of requests."""
        opener = self._channel.stream_unary
        return self._prepare(UnaryReply, opener, method, request_serializer, response_deserializer, options)

    def _prepare(
        self,
        kind: type[UnaryReply | ReplyStream],
        opener: Callable[..., Any],
        method: str,
        serialise: Callable[[Any], bytes] | None,
        parse: Callable[[bytes], Any] | None,
        options: dict[str, Any],
    ) -> Callable[..., Any]:
        """A function that starts calls of one method."""
        if self._key is None or method in UNTAGGED_METHODS:
            return partial(self._start, kind, opener(method, serialise, _reader(parse), **options))
        call = opener(method, serialise, None, **options)
        return partial(self._start_tagged, kind, call, partial(_TaggedReader, self._key, method, parse or bytes))

    def _start(
        self,
        kind: type[UnaryReply | ReplyStream],
        call: Callable[..., Any],
        request: Any,
        timeout: float | None = None,
        **options: Any,
    ) -> Any:
        started = call(request, timeout=timeout, **options)
        self._on_open(started)
        return kind(started, _FailureCheck(timeout, self._on_damaged))

    def _start_tagged(
        self,
        kind: type[UnaryReply | ReplyStream],
        call: Callable[..., Any],
        new_replies: Callable[[], _TaggedReader],
        request: Any,
        timeout: float | None = None,
        **options: Any,
    ) -> Any:
        replies = new_replies()
        reply = self._start(kind, call, request, timeout, on_token=replies.expect, **options)
        reply.parse = replies.parse
        return reply


class _TaggedReader:
    """Checks and parses the replies of one call. `expect` gets its call token before they come."""

    __slots__ = ("_key", "_method", "_parse", "_tags")

    def __init__(self, key: bytes, method: str, parse: Callable[[bytes], Any]) -> None:
        self._key = key
        self._method = method
        self._parse = parse
        self._tags: ReplyTags | None = None

    def expect(self, token: bytes) -> None:
        self._tags = ReplyTags(self._key, token)

    def parse(self, reply: bytes | None) -> Any:
        """The message, or `Unreadable`."""
        if reply is None or self._tags is None:
            return Unreadable(0)
        untagged = self._tags.remove(reply)
        if untagged is None:
            log.warning("reply_forged", method=self._method, num_bytes=len(reply), tagged=has_tag(reply))
            return Unreadable(len(reply), forged=True)
        return codec.read(self._parse, untagged)


class _FailureCheck:
    """Reports the failure of one call if its connection may be damaged. `timeout` None: the call has no time limit."""

    __slots__ = ("_on_damaged", "_over_at_s")

    def __init__(self, timeout: float | None, on_damaged: Callable[[], None]) -> None:
        self._over_at_s = None if timeout is None else asyncio.get_running_loop().time() + timeout - TIMER_SLACK_S
        self._on_damaged = on_damaged

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """Looks at the status of the call."""
        now = asyncio.get_running_loop().time()
        if may_be_damaged(error, out_of_time=self._over_at_s is not None and now >= self._over_at_s):
            self._on_damaged()

    def unreadable(self, reply: Unreadable) -> NoReturn:
        """Raises the error of a reply that cannot be read. Wrong headers can hide that there is none."""
        if reply.num_bytes == 0 and not reply.forged:
            self._on_damaged()
        raise codec.rpc_error(reply.error)


class UnaryReply:
    """A call with one reply, which `await` returns. `parse` reads it; None: gRPC has done so."""

    parse: Callable[[bytes], Any] | None = None

    def __init__(self, call: Any, check: _FailureCheck) -> None:
        self._call = call
        self._check = check

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            reply = yield from self._call.__await__()
        except grpc.aio.AioRpcError as error:
            self._check.failed(error)
            raise
        if self.parse is not None:
            reply = self.parse(reply)
        if isinstance(reply, Unreadable):
            self._check.unreadable(reply)
        return reply


class ReplyStream:
    """A call with a stream of replies, for `read` or for iteration. An unreadable reply cancels it.

    `parse` reads a reply; None: gRPC has done so.
    """

    parse: Callable[[bytes], Any] | None = None

    def __init__(self, call: Any, check: _FailureCheck) -> None:
        self._call = call
        self._check = check
        self.cancel = call.cancel

    async def read(self) -> Any:
        """The next reply; `grpc.aio.EOF` at the end. Raises `AioRpcError`."""
        try:
            reply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._check.failed(error)
            raise
        if self.parse is not None and reply is not grpc.aio.EOF:
            reply = self.parse(reply)
        if isinstance(reply, Unreadable):
            self._fail(reply)
        return reply

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for reply in self._call:
                if self.parse is not None:
                    reply = self.parse(reply)
                if isinstance(reply, Unreadable):
                    self._fail(reply)
                yield reply
        except grpc.aio.AioRpcError as error:
            self._check.failed(error)
            raise

    def _fail(self, reply: Unreadable) -> NoReturn:
        self.cancel()
        self._check.unreadable(reply)


def _reader(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    return None if parse is None else partial(codec.read, parse)
