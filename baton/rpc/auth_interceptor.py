"""Authenticates and parses every call of a worker's gRPC server before a servicer sees it; translates its errors.

`start_server` creates it. It checks the header of the call token before the request is read, the request against the
token, and the incarnation that the request names. Every method of every service of ours is guarded alike. Log lines of
a servicer carry the ids from the call's metadata.

Health checks need no token: probes have none. So their requests are not read, and cost no memory: the answer to all is
the state of the worker. Reflection, a stream of requests, is served in an open cluster only.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from baton.domain.errors import BatonError, InvalidRequest, LinkBroken, Overloaded
from baton.domain.ids import Incarnation
from baton.rpc import codec
from baton.rpc.call_token import CALL_TOKEN_METADATA_KEY, CallToken, CallTokenFault, CallTokenVerifier
from baton.rpc.incarnation_check import check_incarnation
from baton.rpc.replies.reply_tags import UNTAGGED_METHODS, ReplyTags
from baton.rpc.request_budget import REFLECTION_METHOD, RequestBudget, max_request_bytes
from baton.rpc.request_metadata import log_fields

Context = grpc.aio.ServicerContext[Any, Any]

BUDGET_RETRY_S = 1.0
SESSION_METHOD = "/baton.v1.Session/Connect"
"""A call that is a stream of requests. Its token covers no request: a stranger's first byte is not read, and both ends
prove themselves again before the first frame."""

UPLOAD_METHODS = frozenset(f"/baton.v1.{name}/PutMedia" for name in ("Prefill", "Encode"))
"""Calls that are a stream of requests, whose token covers the first one. It names a digest of all that follows, and the
servicer bounds and checks that."""

HEALTH_METHODS = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))

_REASONS = {
    CallTokenFault.MISSING: "the call carries no token: the caller has no cluster secret, this worker has one",
    CallTokenFault.FORGED: "the call's token does not fit: the cluster secrets of caller and worker differ",
    CallTokenFault.OTHER_INCARNATION: "the call is meant for an earlier incarnation of this worker",
    CallTokenFault.REPLAYED: "the call's token was used before",
}


class Malformed(enum.Enum):
    """The received request is not one that the method takes."""

    MALFORMED = "malformed"
    DAMAGED = "damaged"
    TOO_LARGE = "too_large"
    NO_MEMORY = "no_memory"


_ERRORS = {
    Malformed.MALFORMED: LinkBroken("the request cannot be read"),
    Malformed.DAMAGED: LinkBroken("the request is not the one that the call token was issued for"),
    Malformed.TOO_LARGE: InvalidRequest("the request is larger than this method takes"),
    Malformed.NO_MEMORY: Overloaded("too many bytes of requests are open here", retry_after_s=BUDGET_RETRY_S),
}

Fault = CallTokenFault | Malformed


@dataclass(frozen=True, slots=True)
class RejectedCall:
    """A rejected call. `peer` is gRPC's name of the caller's address."""

    fault: Fault
    method: str
    peer: str

    @property
    def why(self) -> str:
        """The status message that the caller gets."""
        return str(_ERRORS[self.fault]) if isinstance(self.fault, Malformed) else _REASONS[self.fault]


@dataclass(frozen=True, slots=True)
class CallRules:
    """`open`: calls without a token are served, too, as in an open cluster. `tags_replies`: callers expect tags."""

    incarnation: Incarnation
    keys: tuple[bytes, ...]
    open: bool
    tags_replies: bool = False


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Owned by one event loop. `on_rejected` gets every rejected call."""

    def __init__(self, rules: CallRules, on_rejected: Callable[[RejectedCall], None]) -> None:
        self._rules = rules
        self._verifier = CallTokenVerifier(rules.keys, rules.incarnation)
        self._on_rejected = on_rejected
        self._handlers: dict[str, Any] = {}
        self.budget = RequestBudget()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of one call; None for a method that does not exist. The request is not read yet."""
        method = _text(details.method)
        handler = self._handlers.get(method)
        if handler is None:
            handler = await continuation(details)
            if handler is None:  # not cached: names of missing methods are unbounded
                return None
            reflects = self._rules.open and method == REFLECTION_METHOD
            if handler.request_streaming and method not in (SESSION_METHOD, *UPLOAD_METHODS) and not reflects:
                raise NotImplementedError(f"{method}: a stream of requests cannot carry call tokens")
            self._handlers[method] = handler
        if method in HEALTH_METHODS:
            return _unread(handler)
        token = self._admit(method, details.invocation_metadata or ())
        if isinstance(token, Fault):
            return self._refusal(token, method)
        if method in UPLOAD_METHODS:
            return self._guard_upload(method, handler, token)
        if handler.request_streaming:
            return handler  # of a session all that follows is tagged, from the handshake on
        return self._guard(method, handler, token)

    def _admit(self, method: str, metadata: Any) -> CallToken | Fault | None:
        """Checks a call by its metadata, and takes the request's bytes from the budget until the call has ended."""
        token: CallToken | CallTokenFault | None = self._verifier.accept(method, _call_token(metadata))
        if token is CallTokenFault.MISSING and self._rules.open:
            token = None
        if isinstance(token, CallTokenFault):
            return token
        num_bytes = max_request_bytes(method) if token is None else token.num_bytes
        if num_bytes > max_request_bytes(method):
            return Malformed.TOO_LARGE
        if not self.budget.take(num_bytes):
            return Malformed.NO_MEMORY
        serving = asyncio.current_task()  # gRPC runs interceptors and handler in one task a call
        assert serving is not None
        serving.add_done_callback(lambda _: self.budget.release(num_bytes))
        return token

    def _refusal(self, fault: Fault, method: str) -> Any:
        """A handler that refuses a call. It takes a stream, because gRPC reads a stream only when asked to."""

        async def refuse(requests: object, context: Context) -> AsyncGenerator[bytes, None]:
            await self._reject(fault, method, context)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse, None, None)

    def _guard(self, method: str, handler: Any, token: CallToken | None) -> Any:
        """Wraps `handler` so that it takes one request as raw bytes."""

        async def unary(body: bytes, context: Context) -> Any:
            try:
                return await handler.unary_unary(await self._read(method, handler, body, token, context), context)
            except BatonError as error:
                await codec.abort(context, error)

        async def stream(bodies: AsyncIterable[bytes], context: Context) -> AsyncGenerator[Any, None]:
            try:
                body = await anext(aiter(bodies), None)
                if body is None:  # cut short: gRPC would leave the caller without an answer until its deadline
                    await self._reject(Malformed.MALFORMED, method, context)
                    return
                request = await self._read(method, handler, body, token, context)
                async with aclosing(handler.unary_stream(request, context)) as events:
                    async for event in events:
                        yield event
            except BatonError as error:
                await codec.abort(context, error)

        serializer = self._serializer(method, handler, token)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, serializer)
        return grpc.unary_unary_rpc_method_handler(unary, None, serializer)

    def _serializer(self, method: str, handler: Any, token: CallToken | None) -> Callable[[Any], bytes]:
        """Serialises the replies of one call, with tags if its caller expects them."""
        serialise: Callable[[Any], bytes] = handler.response_serializer
        if token is None or not self._rules.tags_replies or method in UNTAGGED_METHODS:
            return serialise
        tags = ReplyTags(token.key, token.header)
        return lambda reply: tags.add(serialise(reply))

    def _guard_upload(self, method: str, handler: Any, token: CallToken | None) -> Any:
        """Wraps `handler` so that it gets the requests of a stream one by one, the first one checked."""

        async def requests(bodies: AsyncIterable[bytes], context: Context) -> AsyncGenerator[Any, None]:
            unchecked = token
            async for body in bodies:
                yield await self._read(method, handler, body, unchecked, context)
                unchecked = None

        async def upload(bodies: AsyncIterable[bytes], context: Context) -> Any:
            try:
                async with aclosing(requests(bodies, context)) as parsed:
                    return await handler.stream_unary(parsed, context)
            except BatonError as error:
                await codec.abort(context, error)

        return grpc.stream_unary_rpc_method_handler(upload, None, self._serializer(method, handler, token))

    async def _read(self, method: str, handler: Any, body: bytes, token: CallToken | None, context: Context) -> Any:
        """The parsed request. Aborts the call or raises `BatonError` for a request that is not served."""
        if token is not None and not token.covers(body):
            await self._reject(Malformed.DAMAGED, method, context)
        structlog.contextvars.bind_contextvars(**log_fields(context.invocation_metadata() or ()))
        request = codec.read(handler.request_deserializer, body)
        if isinstance(request, codec.Unreadable):
            await self._reject(Malformed.MALFORMED, method, context)
        try:
            check_incarnation(request, self._rules.incarnation)
        except BatonError:
            self._on_rejected(RejectedCall(CallTokenFault.OTHER_INCARNATION, method, context.peer()))
            raise
        return request

    async def _reject(self, fault: Fault, method: str, context: Context) -> None:
        """Reports the call and ends it. Never returns."""
        rejected = RejectedCall(fault, method, context.peer())
        self._on_rejected(rejected)
        if isinstance(fault, Malformed):
            await codec.abort(context, _ERRORS[fault])
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, rejected.why)


def _unread(handler: Any) -> Any:
    """Wraps the handler of a health check so that it gets an empty request: the one that was sent stays unread."""

    async def serve(bodies: object, context: Context) -> AsyncGenerator[Any, None]:
        request = handler.request_deserializer(b"")
        if not handler.response_streaming:
            yield await handler.unary_unary(request, context)
            return
        async with aclosing(handler.unary_stream(request, context)) as events:
            async for event in events:
                yield event

    return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)


def _call_token(metadata: Any) -> bytes | None:
    for key, value in metadata:
        if key == CALL_TOKEN_METADATA_KEY:
            return value if isinstance(value, bytes) else None
    return None


def _text(method: str | bytes) -> str:
    return method.decode(errors="replace") if isinstance(method, bytes) else method
