"""The metadata that an authenticated channel adds to a call."""

from __future__ import annotations

from typing import Any, cast

import grpc

from baton.domain.ids import Incarnation
from baton.rpc.call_token import CALL_TOKEN_METADATA_KEY, CallTokenIssuer
from baton.rpc.channel import AuthenticatedChannel


class RecordingChannel:
    def __init__(self) -> None:
        self.metadata: tuple[tuple[str, str | bytes], ...] = ()

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        def call(body: bytes, timeout: float | None, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
            self.metadata = metadata

        return call


def test_the_token_stands_beside_the_metadata_of_the_call():
    channel = RecordingChannel()
    authenticated = AuthenticatedChannel(cast(grpc.Channel, channel), CallTokenIssuer(b"k" * 32, Incarnation(1)))
    call = authenticated.unary_unary("/m", request_serializer=bytes)
    call(b"request", metadata=(("baton-request-id", "r"),))
    assert [key for key, _ in channel.metadata] == [CALL_TOKEN_METADATA_KEY, "baton-request-id"]
    call(b"request")
    assert [key for key, _ in channel.metadata] == [CALL_TOKEN_METADATA_KEY]
