"""Child processes: each has a log file, all are watched, stopped in order, and end with this process.

Called by `baton.services.cli.up`. Owned by one asyncio loop on the main thread. Knows no service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.services.cli.processes import die_with_parent
from baton.services.cli.processes.child_command import ChildCommand, log_tail
from baton.services.cli.processes.fork_server import ForkedService, NotForked, ServiceForkServer
from baton.services.cli.processes.orphans import reap_strangers
from baton.settings.process import child_environment

KILL_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class Child:
    """A started process; its output goes to `log`."""

    def __init__(self, command: ChildCommand, log: Path, process: asyncio.subprocess.Process | ForkedService) -> None:
        self.command = command
        self.name = command.name
        self.log = log
        self.process = process
        self.exit = asyncio.create_task(process.wait(), name=f"exit of {command.name}")

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of its log."""
        return log_tail(self.log, num_lines)

    def exit_report(self) -> str:
        """What to say of its end."""
        how = f"{self.name} ended by itself with exit code {self.process.returncode}. Its last log lines:"
        return f"{how}\n{self.log_tail() or '(none)'}"

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; no effect after its end.

        Not by asyncio's process: it may reap one that has just ended, whose exit code is 255 then.
        """
        if isinstance(self.process, ForkedService):
            self.process.send(number)
        elif self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def stop(self, grace_s: float) -> None:
        """Terminates it, waits `grace_s`, then kills it; returns after its end. Idempotent."""
        if self.running:
            self.send(signal.SIGTERM)
            await asyncio.wait([self.exit], timeout=grace_s)
        self.send(signal.SIGKILL)
        await asyncio.wait_for(self.exit, KILL_TIMEOUT_S)


class Supervisor:
    """All children of this process. Leaving the context kills those that still run.

    With a fork server it reaps orphans, too, when they end: within the context, as SIGCHLD arrives.
    """

    def __init__(self, log_dir: Path, fork_server: ServiceForkServer | None = None) -> None:
        """`fork_server`: starts the services that it takes."""
        self._log_dir = log_dir
        self._fork_server = fork_server
        self.children: list[Child] = []
        self.asked: set[Child] = set()
        """Children that `end` has ended: their exit is no fault."""
        self.was_killed = False
        """`kill` was called."""

    async def __aenter__(self) -> Supervisor:
        if self._fork_server is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, reap_strangers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(child.stop(grace_s=0.0) for child in self.children))
        if self._fork_server is not None:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
            reap_strangers()

    async def start(self, command: ChildCommand) -> Child:
        """Starts a child in its own process group: Ctrl-C in a terminal reaches only this process, which then stops
        its children in order.

        What the fork server cannot fork now is started by itself. Raises `OSError` when the log cannot be written or
        the program does not exist, `StartFailed` when the fork server ends or does not answer.
        """
        log = self._log_dir / f"{command.name}.log"
        with log.open("ab") as output:
            process = await self._fork(command, output.fileno()) or await _execute(command, output.fileno())
        child = Child(command, log, process)
        self.children.append(child)
        return child

    async def _fork(self, command: ChildCommand, output: int) -> ForkedService | None:
        """A fork; None where the service has to be started by itself."""
        if self._fork_server is None or not self._fork_server.takes(command):
            return None
        try:
            return await self._fork_server.fork(command, output)
        except NotForked as error:
            _log.warning("%s could not be forked, and is started by itself: %s", command.name, error)
            return None

    def end(self, child: Child, *, graceful: bool) -> None:
        """Terminates or kills a child; `first_exit` returns it."""
        self.asked.add(child)
        child.send(signal.SIGTERM if graceful else signal.SIGKILL)

    def kill(self) -> None:
        """Kills all children at once; a `stop` that waits for them goes on."""
        self.was_killed = True
        for child in self.children:
            child.send(signal.SIGKILL)

    async def restart(self, child: Child) -> Child:
        """Starts an ended child again, with the same command and log. Raises as `start`; then it may be tried again."""
        if child in self.children:
            self.children.remove(child)
        self.asked.discard(child)
        return await self.start(child.command)

    async def first_exit(self) -> Child:
        """Waits until a child ends and returns it. Commands that are not `watched` are left to others."""
        watched = [child for child in self.children if child.command.watched]
        await asyncio.wait([child.exit for child in watched], return_when=asyncio.FIRST_COMPLETED)
        return next(child for child in watched if not child.running)

    async def stop(self, stages: Sequence[str], grace_s: float) -> list[str]:
        """Stops children stage by stage: those whose name begins with the first prefix, then the next, then the rest.

        Each stage takes at most `grace_s`, or what its commands have, and a few seconds. Returns the names of those
        that had to be killed.
        """
        killed: list[str] = []
        for prefix in (*stages, ""):
            stage = [child for child in self.children if child.running and child.name.startswith(prefix)]
            await asyncio.gather(*(child.stop(min(grace_s, child.command.stop_s)) for child in stage))
            killed += [child.name for child in stage if child.process.returncode == -9]
        return killed


async def _execute(command: ChildCommand, output: int) -> asyncio.subprocess.Process:
    """Starts a program of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command.arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env=child_environment(command.variables),
        process_group=0,
    )
