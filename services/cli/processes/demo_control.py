"""Kills and drains workers of `baton up --demo` for the router's page. Called by `baton.services.cli.up`.

The router, a child process, writes one line of JSON to a Unix socket that only this user can open, and reads one:
`{"action": "kill", "worker": "decode-0"}` -> `{"error": ""}`. A worker that ends this way is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from baton.rpc.sockets.listen import stop_accepting
from baton.services.cli.processes.supervisor import Supervisor

MAX_LINE_BYTES = 1024
TIMEOUT_S = 5.0
ROLES = ("prefill-", "decode-", "encode-")


class DemoServer:
    """Serves one socket."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @contextlib.asynccontextmanager
    async def serving(self, path: Path | None) -> AsyncIterator[None]:
        """Serves within the context. `path` lies in a folder of this user; None: there is no demo."""
        if path is None:
            yield
            return
        server = await asyncio.start_unix_server(self._answer, path, limit=MAX_LINE_BYTES)
        try:
            yield
        finally:
            await stop_accepting(server)
            await server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                error = self._act(await reader.readline())
                writer.write(json.dumps({"error": error}).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ValueError, ConnectionError):
            pass  # the router reports that there was no answer
        finally:
            writer.close()

    def _act(self, line: bytes) -> str:
        """Does what the line asks for; returns why not."""
        asked = json.loads(line)
        action, worker = asked.get("action"), asked.get("worker")
        running = {child.name: child for child in self._supervisor.children if child.running}
        if worker not in running or not worker.startswith(ROLES):
            return f"no worker {worker!r} runs here"
        if action not in ("kill", "drain"):
            return f"no such action: {action!r}"
        self._supervisor.end(running[worker], graceful=action == "drain")
        return ""
