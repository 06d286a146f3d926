"""The Handoff service for other workers: `Hello`, `Watch`, `OpenExport`, `Commit`, `Renew`, `Abort` and `ReadPages`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from baton.domain.errors import LinkBroken
from baton.engine.handoff.export_commands import ExportMailbox
from baton.rpc import codec
from baton.rpc.gen import common_pb2, handoff_pb2, handoff_pb2_grpc
from baton.worker.handoff.handoff_handlers import HandoffHandlers, LinkConfig
from baton.worker.handoff.handoff_log import HandoffLog

ReadPages = Callable[
    [handoff_pb2.ReadPagesRequest, "grpc.aio.ServicerContext[Any, Any]"], AsyncIterator[handoff_pb2.PageBytes]
]


class HandoffServicer(handoff_pb2_grpc.HandoffServicer):
    """Serves by calls the workers that read pages of this one. `handlers` answer in sessions, too."""

    def __init__(
        self, terms: LinkConfig, mailbox: ExportMailbox, handoffs: HandoffLog, read_pages: ReadPages | None
    ) -> None:
        self.handlers = HandoffHandlers(terms, mailbox, handoffs)
        self._transports = tuple(terms.transports)
        self._read_pages = read_pages

    async def Hello(
        self, request: handoff_pb2.HelloRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> handoff_pb2.HelloReply:
        """See handoff.proto."""
        return await self.handlers.hello(request)

    async def Watch(
        self, request: handoff_pb2.WatchRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[handoff_pb2.HandoffEvent, None]:
        """See handoff.proto."""
        async with aclosing(self.handlers.watch(request)) as events:
            async for event in events:
                yield event

    async def OpenExport(
        self, request: handoff_pb2.OpenExportRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> handoff_pb2.OpenExportReply:
        """See handoff.proto."""
        return await self.handlers.open_export(request)

    async def Commit(
        self, request: handoff_pb2.CommitRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> handoff_pb2.CommitReply:
        """See handoff.proto."""
        return await self.handlers.commit(request)

    async def Renew(
        self, request: handoff_pb2.RenewRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> handoff_pb2.RenewReply:
        """See handoff.proto."""
        return await self.handlers.renew(request)

    async def Abort(
        self, request: common_pb2.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> common_pb2.AbortReply:
        """See handoff.proto."""
        return await self.handlers.abort(request)

    async def ReadPages(
        self, request: handoff_pb2.ReadPagesRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[handoff_pb2.PageBytes, None]:
        """See handoff.proto."""
        if self._read_pages is None:
            refusal = LinkBroken(f"transports: {', '.join(self._transports)} here, stream there")
            await codec.abort(context, refusal)
        async for data in self._read_pages(request, context):
            yield data
