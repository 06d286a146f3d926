"""A mock encode worker: holds files as `MockMedia` does. Prefill's mock asks it for embeddings by its incarnation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from baton.domain.worker import LinkRecord, WorkerBudgets, WorkerRecord, WorkerRole
from baton.rpc.gen import encode_pb2_grpc, prefill_pb2
from tests.mock_workers import MockWorker
from tests.mocks.media import MockMedia


class MockEncode(MockWorker, encode_pb2_grpc.EncodeServicer):
    """`vision`: fingerprint of its embeddings."""

    role = WorkerRole.ENCODE
    budgets = WorkerBudgets()

    def __init__(self, id: str, processor: str, vision: str) -> None:
        super().__init__(id)
        self.processor = processor
        self.vision = vision
        self.media = MockMedia()

    def record(self, links: Sequence[LinkRecord] = ()) -> WorkerRecord:
        return replace(super().record(links), fingerprint="", page_size=0, vision=self.vision)

    async def PutMedia(  # gRPC's name
        self, requests: AsyncIterator[prefill_pb2.PutMediaRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PutMediaResponse:
        return await self.media.put(requests, context)

    def _register(self, server: grpc.aio.Server) -> None:
        encode_pb2_grpc.add_EncodeServicer_to_server(self, server)
