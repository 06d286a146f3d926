"""The redis-server of `baton up`: a child of its `Supervisor` that is started again whenever it ends.

It listens on a Unix socket in a folder of its own, which only this user may enter, and keeps an append-only file there.
So a server that was killed comes back at the same URL with everything that it had acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.local_redis import private_folder, require_server, server_arguments, socket_in
from baton.services.cli.processes.restart_budget import MAX_PAUSE_S, RestartBudget
from baton.services.cli.processes.supervisor import Child, Supervisor
from baton.store.store import StoreUnavailable

REDIS = "redis"
"""The name of the child, and of its log."""
START_TIMEOUT_S = 10.0
STOP_S = 5.0
TOO_OFTEN = (
    f"It ends again and again. It is still started again, every {MAX_PAUSE_S:.0f} s at last; no more is told of that. "
    "Requests are served meanwhile, and none is durable."
)
_PING_INTERVAL_S = 0.01


class EmbeddedRedis:
    """Use `embedded_redis`. The supervisor that starts it stops it, too."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self._socket = socket_in(folder)
        arguments = (str(binary), *server_arguments(folder, durable=True))
        self.command = ChildCommand(REDIS, arguments, {}, stop_s=STOP_S, watched=False)
        self._restarts = RestartBudget()

    @property
    def url(self) -> str:
        """URL for `connect`; other processes of this user can use it, too."""
        return f"unix://{self._socket}"

    async def start(self, supervisor: Supervisor) -> Child:
        """Starts the server and waits for its first answer. One that a signal ends before it is started again.

        Raises `StoreUnavailable` when it exits, or does not answer in time, and `OSError` when it cannot be started.
        """
        child = await supervisor.start(self.command)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers():
                    if not (await asyncio.wait([child.exit], timeout=_PING_INTERVAL_S))[0]:
                        continue
                    status = child.exit.result()
                    if status >= 0 or not self._restarts.allows(time.monotonic()):
                        raise StoreUnavailable(f"redis-server exited with status {status}: {_tail(child)}")
                    child = await supervisor.restart(child)
        except TimeoutError:
            why = f"redis-server has not answered within {START_TIMEOUT_S:.0f} s"
            raise StoreUnavailable(f"{why}: {_tail(child)}") from None
        return child

    async def keep_running(self, supervisor: Supervisor, child: Child, tell: Callable[[str], object]) -> NoReturn:
        """Starts the server again whenever it ends, until this is cancelled. `child`: what `start` has started.

        A restart that fails counts as an end. `tell` gets what to say of each; once they are too many, it gets one more
        text, and then none until there have been fewer: the others serve on, so nothing ends here.
        """
        await asyncio.wait([child.exit])
        why, is_told = child.exit_report(), False
        while True:
            if self._restarts.allows(time.monotonic()):
                tell(f"{why}\nIt is started again.")
                is_told = False
            elif not is_told:
                tell(f"{why}\n{TOO_OFTEN}")
                is_told = True
            await asyncio.sleep(self._restarts.pause_s)  # back-off
            try:
                child = await supervisor.restart(child)
            except (OSError, RuntimeError) as error:  # no process, or no thread to wait for its end
                why = f"{REDIS} could not be started again: {error}"
            else:
                await asyncio.wait([child.exit])
                why = child.exit_report()

    async def _answers(self) -> bool:
        """Pings. False while nobody listens, and while the server loads its file."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"
        except OSError:
            return False
        finally:
            writer.close()


@contextlib.contextmanager
def embedded_redis() -> Iterator[EmbeddedRedis]:
    """A server that can be started within the context. Removes its data. Raises `StoreUnavailable` without a binary."""
    binary, folder = require_server(), private_folder()
    try:
        yield EmbeddedRedis(binary, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tail(child: Child) -> str:
    return " | ".join(child.log_tail(3).splitlines()) or "no output"
