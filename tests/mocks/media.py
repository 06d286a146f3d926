"""The images of a mock prefill worker: what was put, under which salt, and what it says to a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.domain.errors import BatonError, NeedMedia
from baton.domain.request import EngineRequest
from baton.rpc.channel import send_go_ahead
from baton.rpc.codec import abort
from baton.rpc.gen import prefill_pb2


class MockMedia:
    """Holds files, until a test forgets them. `outcomes`: of the next uploads; HELD after them.

    `errors`: of the next uploads, which they end. `num_forgotten`: of the next uploads, evicted at once. `hangs`: an
    upload never ends. `holds_pulls`: a pull never ends. `sources`: what the encode workers hold, by their incarnation.
    """

    def __init__(self) -> None:
        self.headers: list[prefill_pb2.MediaHeader] = []
        self.held: dict[tuple[str, bytes], bytes] = {}
        self.outcomes: list[int] = []
        self.errors: list[BatonError] = []
        self.sources: dict[int, MockMedia] = {}
        self.num_pulled = 0
        self.num_forgotten = 0
        self.hangs = False
        self.holds_pulls = False
        self.pull_begun, self.pull_ended = asyncio.Event(), asyncio.Event()
        self.arrived = asyncio.Event()

    async def put(
        self, requests: AsyncIterator[prefill_pb2.PutMediaRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PutMediaResponse:
        header = (await anext(requests)).header
        self.headers.append(header)
        self.arrived.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.errors:
            await abort(context, self.errors.pop(0))
        outcome = self.outcomes.pop(0) if self.outcomes else prefill_pb2.MEDIA_OUTCOME_HELD
        if outcome != prefill_pb2.MEDIA_OUTCOME_HELD:
            return prefill_pb2.PutMediaResponse(outcome=outcome, message="is damaged")  # type: ignore[arg-type]
        if header.HasField("source"):
            if self.holds_pulls:
                self.pull_begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.pull_ended.set()
            return self._pull(header)
        await send_go_ahead(context)
        data = b"".join([request.data async for request in requests])
        assert len(data) == header.num_bytes
        if self.num_forgotten:
            self.num_forgotten -= 1
        else:
            self.held[header.salt, header.identity] = data
        return prefill_pb2.PutMediaResponse(outcome=prefill_pb2.MEDIA_OUTCOME_HELD, num_rows=header.num_rows)

    def _pull(self, header: prefill_pb2.MediaHeader) -> prefill_pb2.PutMediaResponse:
        source, key = self.sources.get(header.source.incarnation), (header.salt, header.identity)
        if source is None or key not in source.held:
            return prefill_pb2.PutMediaResponse(outcome=prefill_pb2.MEDIA_OUTCOME_SOURCE_LOST)
        self.num_pulled += 1
        self.held[key] = source.held[key]
        return prefill_pb2.PutMediaResponse(outcome=prefill_pb2.MEDIA_OUTCOME_HELD, num_rows=header.num_rows)

    def missing(self, request: EngineRequest) -> NeedMedia | None:
        """The failure of a request whose images are not held; None if all are."""
        identities = dict.fromkeys(span.identity for span in request.media)
        absent = tuple(identity for identity in identities if (request.salt, identity) not in self.held)
        return NeedMedia("images are missing", absent) if absent else None
