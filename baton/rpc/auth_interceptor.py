"""Authenticates and parses every call of a worker's gRPC server before a servicer sees it; translates its errors.

`start_server` creates it. It checks the call token over the request's raw bytes, then parses them. Every method of
every service is guarded alike. Log lines of a servicer carry the ids from the call's metadata.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from baton.domain.errors import BatonError
from baton.rpc import codec
from baton.rpc.call_token import CALL_TOKEN_METADATA_KEY, CallTokenFault, CallTokenVerifier
from baton.rpc.request_metadata import log_fields

Context = grpc.aio.ServicerContext[Any, Any]

_REASONS = {
    CallTokenFault.MISSING: "the call carries no token: the caller has no cluster secret, this worker has one",
    CallTokenFault.FORGED: "the call's token does not fit: the cluster secrets of caller and worker differ",
    CallTokenFault.OTHER_INCARNATION: "the call is meant for an earlier incarnation of this worker",
    CallTokenFault.REPLAYED: "the call's token was used before",
}


class Malformed(enum.Enum):
    """The bytes are not a message of the method's type."""

    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class RejectedCall:
    """A rejected call. `peer` is gRPC's name of the caller's address."""

    fault: CallTokenFault | Malformed
    method: str
    peer: str

    @property
    def why(self) -> str:
        """The status message that the caller gets."""
        return "the request cannot be read" if isinstance(self.fault, Malformed) else _REASONS[self.fault]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """`verifier` None: an open cluster, messages are only parsed. `on_rejected` gets every rejected call."""

    def __init__(self, verifier: CallTokenVerifier | None, on_rejected: Callable[[RejectedCall], None]) -> None:
        self._verifier = verifier
        self._on_rejected = on_rejected
        self._guarded: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's guarded handler; None for a method that does not exist."""
        method = _text(details.method)
        if method not in self._guarded:
            handler = await continuation(details)
            if handler is None:  # not cached: names of missing methods are unbounded
                return None
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: Any) -> Any:
        """Wraps `handler` so that it takes requests as raw bytes."""
        if handler.request_streaming:
            raise NotImplementedError(f"{method}: a stream of requests cannot carry call tokens")
        parse, serialise = handler.request_deserializer, handler.response_serializer

        async def unary(body: bytes, context: Context) -> Any:
            try:
                return await handler.unary_unary(await self._admit(method, body, parse, context), context)
            except BatonError as error:
                await codec.abort(context, error)

        async def stream(body: bytes, context: Context) -> AsyncGenerator[Any, None]:
            try:
                request = await self._admit(method, body, parse, context)
                async with aclosing(handler.unary_stream(request, context)) as events:
                    async for event in events:
                        yield event
            except BatonError as error:
                await codec.abort(context, error)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, None, serialise)
        return grpc.unary_unary_rpc_method_handler(unary, None, serialise)

    async def _admit(self, method: str, body: bytes, parse: Callable[[bytes], Any], context: Context) -> Any:
        """The parsed request. Aborts the call without a valid token; raises `LinkBroken` for unreadable bytes."""
        if self._verifier is not None:
            fault = self._verifier.check(method, body, _call_token(context))
            if fault is not None:
                rejected = self._reject(fault, method, context)
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, rejected.why)
        structlog.contextvars.bind_contextvars(**log_fields(context.invocation_metadata() or ()))
        request = codec.read(parse, body)
        if isinstance(request, codec.Unreadable):
            self._reject(Malformed.MALFORMED, method, context)
            raise request.error
        return request

    def _reject(self, fault: CallTokenFault | Malformed, method: str, context: Context) -> RejectedCall:
        rejected = RejectedCall(fault, method, context.peer())
        self._on_rejected(rejected)
        return rejected


def _call_token(context: Context) -> bytes | None:
    for key, value in context.invocation_metadata() or ():
        if key == CALL_TOKEN_METADATA_KEY:
            return value if isinstance(value, bytes) else None
    return None


def _text(method: str | bytes) -> str:
    return method.decode(errors="replace") if isinstance(method, bytes) else method
