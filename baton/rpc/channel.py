"""Opens channels: plain or with TLS, and with a call token on every call.

Called by `baton.rpc.channel_pool` (asyncio) and by the `stream` transport (threads). A channel class of our own adds
the token, not an interceptor, because the token covers the sent bytes: protobuf does not promise that a second
serialisation gives the same ones.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from baton.domain.errors import from_code
from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc import codec
from baton.rpc.call_token import CALL_TOKEN_METADATA_KEY, OPEN_CLUSTER_KEY, CallTokenIssuer
from baton.rpc.request_metadata import Metadata

Options = Sequence[tuple[str, Any]]
AnyChannel = TypeVar("AnyChannel", grpc.aio.Channel, grpc.Channel)


GO_AHEAD = "baton-go-ahead"
"""Key of the initial metadata with which a worker asks for the rest of a stream of requests."""

# Workers send these without a code of ours, for pages that they cannot serve. UNAVAILABLE: gRPC reconnects by itself.
_MEANT_WITHOUT_CODE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
)


class FailedCall(Protocol):
    """The part of a gRPC error, of asyncio or of threads, that tells whose it is."""

    def code(self) -> grpc.StatusCode:
        """Its status."""
        ...

    def trailing_metadata(self) -> Any:
        """Pairs of name and value; None for none."""
        ...


def may_be_damaged(failed: FailedCall, *, out_of_time: bool) -> bool:
    """True for a status that no worker of ours means: its connection may fail every later call in the same way.

    HPACK keeps a table of headers for the life of a connection, and without TLS one flipped bit in it is never noticed.
    A worker that refuses a call token counts as well: the token covers the method's name. `out_of_time`: the call's own
    time limit has passed.
    """
    status = failed.code()
    for key, value in failed.trailing_metadata() or ():
        if key == codec.CODE_METADATA_KEY and isinstance(value, str):
            named = from_code(value, "")
            return named.code != value or codec.grpc_status(named) is not status
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return not out_of_time
    return status not in _MEANT_WITHOUT_CODE


async def send_go_ahead(context: Any) -> None:
    """Asks the caller of a servicer's `context` for the rest of its requests."""
    await context.send_initial_metadata(((GO_AHEAD, "1"),))


def open_channel(address: str, trust: ClusterTrust, options: Options) -> grpc.aio.Channel:
    """A channel to host:port `address`; with TLS the peer's certificate must name `host`. Connects when first used."""
    credentials = channel_credentials(trust)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_sync_channel(address: str, trust: ClusterTrust, options: Options) -> grpc.Channel:
    """Like `open_channel`, for threads."""
    credentials = channel_credentials(trust)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def channel_credentials(trust: ClusterTrust) -> grpc.ChannelCredentials | None:
    """The TLS credentials of a caller; None without certificates."""
    if trust.tls is None:
        return None
    return grpc.ssl_channel_credentials(trust.tls.authorities, trust.tls.key, trust.tls.certificate)


def server_credentials(trust: ClusterTrust) -> grpc.ServerCredentials | None:
    """The TLS credentials of a server, which refuses callers without a certificate of the same authorities."""
    if trust.tls is None:
        return None
    pair = (trust.tls.key, trust.tls.certificate)
    return grpc.ssl_server_credentials([pair], trust.tls.authorities, require_client_auth=True)


class AuthenticatedChannel:
    """The part of a channel that stubs use, with a token for one worker incarnation on every call.

    `channel` may be one for asyncio or one for threads. Its opener closes it. The option `on_token` of a call gets its
    token.
    """

    def __init__(self, channel: grpc.aio.Channel | grpc.Channel, issuer: CallTokenIssuer) -> None:
        self._channel: Any = channel
        self._issuer = issuer

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Callable[..., Any]:
        """As in `grpc.Channel`; the result is called with a request."""
        call = self._channel.unary_unary(method, None, response_deserializer, **options)
        return self._with_token(method, request_serializer, call)

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Callable[..., Any]:
        """As in `grpc.Channel`; the result is called with a request."""
        call = self._channel.unary_stream(method, None, response_deserializer, **options)
        return self._with_token(method, request_serializer, call)

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any
    ) -> Callable[..., Any]:
        """As in `grpc.aio.Channel`; the result is called with an iterable of requests. The token covers the first one.

        The others are sent once the worker has said that it wants them: a call that ends while its caller still writes
        would lose its status.
        """
        call = self._channel.stream_unary(method, None, response_deserializer, **options)

        def start(
            requests: Iterable[Any],
            timeout: float | None = None,
            metadata: Metadata = (),
            on_token: Callable[[bytes], None] | None = None,
            **options: Any,
        ) -> Any:
            bodies = iter(requests) if request_serializer is None else map(request_serializer, requests)
            first = next(bodies)
            token = self._token(method, first, on_token)

            async def after_go_ahead() -> AsyncGenerator[bytes, None]:
                yield first
                if GO_AHEAD not in dict(await started.initial_metadata()):
                    await started.code()
                    return
                for body in bodies:
                    yield body

            started = call(after_go_ahead(), timeout=timeout, metadata=(token, *metadata), **options)
            return started

        return start

    def _with_token(
        self, method: str, serialise: Callable[[Any], bytes] | None, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        def start(
            request: Any,
            timeout: float | None = None,
            metadata: Metadata = (),
            on_token: Callable[[bytes], None] | None = None,
            **options: Any,
        ) -> Any:
            body = request if serialise is None else serialise(request)
            token = self._token(method, body, on_token)
            return call(body, timeout=timeout, metadata=(token, *metadata), **options)

        return start

    def _token(self, method: str, body: bytes, on_token: Callable[[bytes], None] | None) -> tuple[str, bytes]:
        token = self._issuer.issue(method, body)
        if on_token is not None:
            on_token(token)
        return CALL_TOKEN_METADATA_KEY, token


def with_call_tokens(channel: AnyChannel, trust: ClusterTrust, incarnation: Incarnation) -> AuthenticatedChannel:
    """`channel` with call tokens for one worker incarnation."""
    return AuthenticatedChannel(channel, call_token_issuer(trust, incarnation))


def call_token_issuer(trust: ClusterTrust, incarnation: Incarnation) -> CallTokenIssuer:
    """Issues tokens for calls to one worker incarnation; of a public key in an open cluster."""
    return CallTokenIssuer(trust.key("call-token") or OPEN_CLUSTER_KEY, incarnation)
