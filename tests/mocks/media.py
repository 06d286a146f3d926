"""The images of a mock prefill worker: what was put, under which salt, and what it says to a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.domain.errors import NeedMedia
from baton.domain.request import EngineRequest
from baton.rpc.channel import send_go_ahead
from baton.rpc.gen import prefill_pb2


class MockMedia:
    """Holds files, until a test forgets them. `outcomes`: of the next uploads; HELD after them."""

    def __init__(self) -> None:
        self.headers: list[prefill_pb2.MediaHeader] = []
        self.held: dict[tuple[str, bytes], bytes] = {}
        self.outcomes: list[int] = []

    async def put(
        self, requests: AsyncIterator[prefill_pb2.PutMediaRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PutMediaResponse:
        header = (await anext(requests)).header
        self.headers.append(header)
        outcome = self.outcomes.pop(0) if self.outcomes else prefill_pb2.MEDIA_OUTCOME_HELD
        if outcome != prefill_pb2.MEDIA_OUTCOME_HELD:
            return prefill_pb2.PutMediaResponse(outcome=outcome, message="is damaged")  # type: ignore[arg-type]
        await send_go_ahead(context)
        data = b"".join([request.data async for request in requests])
        assert len(data) == header.num_bytes
        self.held[header.salt, header.identity] = data
        return prefill_pb2.PutMediaResponse(outcome=prefill_pb2.MEDIA_OUTCOME_HELD, num_rows=header.num_rows)

    def missing(self, request: EngineRequest) -> NeedMedia | None:
        """The failure of a request whose images are not held; None if all are."""
        identities = dict.fromkeys(span.identity for span in request.media)
        absent = tuple(identity for identity in identities if (request.salt, identity) not in self.held)
        return NeedMedia("images are missing", absent) if absent else None
