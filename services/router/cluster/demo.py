"""Asks `baton up --demo` to kill or drain a worker. Used by `endpoints` where there is a demo."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from baton.domain.errors import InvalidRequest, NoWorkers

TIMEOUT_S = 5.0
ACTIONS = ("kill", "drain")


class DemoCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/cluster/actions`. `action`: kill or drain."""

    action: str
    worker: str


class ActionResult(msgspec.Struct, frozen=True):
    """The answer: "" if it was done."""

    error: str = ""


class DemoClient:
    """`path`: the socket of `baton.services.cli.processes.demo_control`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def act(self, action: DemoCommand) -> None:
        """Returns when the signal is sent. Raises `InvalidRequest` for what cannot be done, `NoWorkers` without an
        answer."""
        if action.action not in ACTIONS:
            raise InvalidRequest(f"action must be one of {', '.join(ACTIONS)}", param="action")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                result = await self._ask(msgspec.json.encode(action))
        except (OSError, TimeoutError, ValueError):
            raise NoWorkers("baton up does not answer", retry_after_s=1.0) from None
        if result.error:
            raise InvalidRequest(result.error, param="worker")

    async def _ask(self, line: bytes) -> ActionResult:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(line + b"\n")
            await writer.drain()
            return msgspec.json.decode(await reader.readline(), type=ActionResult)
        finally:
            writer.close()
