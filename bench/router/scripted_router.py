"""The router's HTTP side in a process of its own: tokens come from a script in the process, not from workers.

    python -m bench.router.scripted_router

Used by `token_path --http-only`. All streams get a token in the same pass of the loop, each `TOKEN_S`, as rows of one
step would. Prints its port, and serves until its standard input closes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from pathlib import Path

import uvicorn
import uvloop

from baton.domain.request import FinishReason, OutputToken
from baton.services.router.edge.http_protocol import BoundedHttpProtocol
from baton.services.router.frontend import ApiLimits
from baton.services.router.generation import AdmittedRequest, TakeChunk, TokenChunk
from baton.services.router.routes import make_app
from baton.store.memory_store import MemoryStore
from baton.store.write_behind.writer import StoreWriter
from bench.harness.child_server import child_server
from bench.router.mock_cluster import MODEL
from tests.fake_dispatcher import FakeDispatcher
from tests.unit.router.memory_frontend import memory_frontend

TOKEN_S = 0.02
FIRST_TOKEN, NUM_TOKENS = 1000, 900
"""Ids of the bundled vocabulary that are text."""


class StepDispatcher(FakeDispatcher):
    """Gives every running sequence one token a step."""

    def __init__(self) -> None:
        super().__init__(lambda sequence: ())
        self._loop = asyncio.get_running_loop()
        self._step: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Makes a step now, and the next one later."""
        self._loop.call_later(TOKEN_S, self.start)
        ended, self._step = self._step, self._loop.create_future()
        ended.set_result(None)

    async def run(self, admitted: AdmittedRequest, take: TakeChunk | None = None) -> AsyncGenerator[TokenChunk, None]:
        """See `Dispatcher.run`."""
        last = admitted.sequence.stop.max_tokens - 1
        try:
            for index in range(last + 1):
                await self._step
                token = OutputToken(index, FIRST_TOKEN + index % NUM_TOKENS)
                yield TokenChunk((token,), 0, FinishReason.LENGTH if index == last else None)
        finally:
            self.outstanding.discard(admitted)


async def serve() -> None:
    """Serves until standard input closes."""
    dispatcher = StepDispatcher()
    async with StoreWriter(MemoryStore()) as writer:
        frontend = memory_frontend(dispatcher, ApiLimits(model_name=MODEL, max_model_len=2048), writer=writer)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        app = make_app(frontend, lambda: (True, ""))
        config = uvicorn.Config(app, http=BoundedHttpProtocol, lifespan="off", ws="none", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        dispatcher.start()
        print(listener.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        server.should_exit = True
        await serving


def scripted_router(tree: Path | None = None) -> AbstractContextManager[tuple[str, int]]:
    """Runs it, of the checkout `tree`; gives its URL and process id. Raises `RuntimeError` if it does not start."""
    return child_server("bench.router.scripted_router", tree=tree)


if __name__ == "__main__":
    uvloop.run(serve())
