"""Starts services as forks of one process that has imported everything: the client of `fork_program`.

Called by `Supervisor`. A fork shares the memory of imports with the others and spends no time on them. It has its own
process group, log, arguments for `ps` and end, as a started process has: only `pid` tells that another forked it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from baton.services.cli.errors import StartFailed
from baton.services.cli.processes.child_command import ChildCommand, log_tail
from baton.services.cli.processes.fork_process import (
    MIN_ARGUMENT_BYTES,
    ForkProcess,
    can_watch_processes,
    start_process,
)
from baton.services.cli.processes.orphans import adopt_orphans
from baton.settings.process import child_environment, thread_variables

LOG_NAME = "fork-server.log"
MAX_ANSWER_BYTES = 4096
END_TIMEOUT_S = 5.0
"""Longest wait for the end of a fork server that has closed its socket."""
FORK_TIMEOUT_S = 120.0
"""Longest wait for one fork, with the imports before it."""


_log = logging.getLogger(__name__)


class NotForked(Exception):
    """The fork server lives, and says why it could not fork."""


class ForkedService:
    """The part of `asyncio.subprocess.Process` that `Child` uses, for a fork that this process has adopted."""

    def __init__(self, pid: int) -> None:
        """Within the running loop. Raises `OSError` if there is no such child."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """The exit code; that of a signal is negative."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM; no effect after its end."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL; no effect after its end."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; no effect after its end."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


class ServiceForkServer:
    """One fork server, which is started again if it has ended. `fork` is for one caller at a time."""

    def __init__(self, commands: Iterable[ChildCommand], log_dir: Path, early: ForkProcess | None = None) -> None:
        """Forks those of `commands` that `takes` accepts. `early`: the process, if it has been started before."""
        found = [command for command in commands if command.words]
        self._variables = _loaded_with(found[0]) if found else {}
        self._num_bytes = max([MIN_ARGUMENT_BYTES, *(len(" ".join(command.arguments)) for command in found)])
        self._log = log_dir / LOG_NAME
        self._process = early
        self._is_ready = False
        self._has_told_of_kernels = False

    def takes(self, command: ChildCommand) -> bool:
        """True for a service with the variables that the libraries of the fork server were loaded with.

        A service sets its number of threads by itself.
        """
        return bool(command.words) and _loaded_with(command) == self._variables

    def start(self) -> None:
        """Starts the process; no effect while it runs. On the main thread, with which it ends.

        Raises `OSError` where processes cannot be adopted, or the log cannot be written.
        """
        if self._process is not None:
            return
        adopt_orphans()
        with self._log.open("ab") as output:
            started = start_process(output, self._num_bytes, child_environment(self._variables))
        self._process, self._is_ready = ForkProcess(*started), False

    async def fork(self, command: ChildCommand, output: int) -> ForkedService:
        """Starts a service; its output goes to the open file `output`.

        A fork server that has ended since it was ready, or by a signal, is started once more. Raises `StartFailed` with
        its last lines if it ends otherwise, or again, or if it does not answer within `FORK_TIMEOUT_S`, and `NotForked`
        if it cannot fork now.
        Cancelled, it ends the fork server, and with it a fork that this process does not know yet.
        """
        was_ready = self._is_ready
        for is_last in (False, True):
            self.start()
            try:
                async with asyncio.timeout(FORK_TIMEOUT_S):
                    return await self._fork(command, output)
            except NotForked:
                raise
            except TimeoutError as error:
                self.close()
                why = f"the fork server has not answered within {FORK_TIMEOUT_S:.0f} s, asked for {command.name}."
                raise StartFailed(f"{why} Its last log lines:\n{log_tail(self._log)}") from error
            except ConnectionError as error:
                try:
                    code, why = await self._end_report()
                finally:
                    self.close()
                by_signal = code is not None and code < 0
                if is_last or not (was_ready or by_signal):
                    raise StartFailed(why) from error
            except BaseException:  # an answer may be on its way
                self.close()
                raise
        raise AssertionError("unreachable")

    async def _fork(self, command: ChildCommand, output: int) -> ForkedService:
        if not self._is_ready:
            await self._answer()
            await self._give_log()
            self._is_ready = True
        assert self._process is not None
        start, other = socket.socketpair()
        with start, other:
            request = json.dumps(command.words).encode()
            socket.send_fds(self._process.requests, [request], [output, other.fileno()])
            answer = await self._answer()
            if "pid" not in answer:
                raise NotForked(str(answer.get("why")))
            process = ForkedService(int(answer["pid"]))
            start.send(b"1")
        self._tell_of_kernels(str(answer.get("kernels", "")))
        return process

    async def _give_log(self) -> None:
        """Has a process that was started early write its log, too. Raises `ConnectionError`."""
        assert self._process is not None
        if self._process.output is None:
            return
        with self._log.open("ab") as log:
            socket.send_fds(self._process.requests, [b"{}"], [log.fileno()])
            await self._answer()
        self._keep_early_output()  # nothing is written to the log until the next request

    def _tell_of_kernels(self, why: str) -> None:
        """Warns once that workers compute in torch, and keep their weights each for itself."""
        if why and not self._has_told_of_kernels:
            self._has_told_of_kernels = True
            _log.warning("%s. Steps take longer, and each worker keeps weights of its own.", why)

    async def _answer(self) -> dict[str, Any]:
        """The next answer. Raises `ConnectionError` if the fork server has ended."""
        assert self._process is not None
        message = await asyncio.get_running_loop().sock_recv(self._process.requests, MAX_ANSWER_BYTES)
        if not message:
            raise ConnectionResetError("the fork server has ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    async def _end_report(self) -> tuple[int | None, str]:
        """The exit code, negative after a signal, None if it is unknown; and what to say."""
        assert self._process is not None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._process.popen.wait, END_TIMEOUT_S)
        self._keep_early_output()
        told = "unknown" if code is None else code
        return (
            code,
            f"the fork server ended by itself with exit code {told}. Its last log lines:\n{log_tail(self._log)}",
        )

    def close(self) -> None:
        """Ends the fork server. Its forks go on. Idempotent."""
        if self._process is not None:
            self._process.end()
            self._keep_early_output()
            self._process.close()
        self._process = None

    def _keep_early_output(self) -> None:
        """Moves what the process wrote before it had a log into the log; it is lost if that cannot be written."""
        if self._process is None or self._process.output is None or self._process.output.closed:
            return
        with contextlib.suppress(OSError), self._log.open("ab") as log:
            self._process.output.seek(0)
            shutil.copyfileobj(self._process.output, log)
        self._process.output.close()


def _loaded_with(command: ChildCommand) -> Mapping[str, str]:
    """The variables of a command that libraries read when they are loaded."""
    return {name: value for name, value in command.variables.items() if name not in thread_variables(1)}


def can_fork() -> bool:
    """True where services can be forked: on Linux, with what adopting a process needs."""
    if sys.platform != "linux" or not can_watch_processes():
        return False
    try:
        adopt_orphans()
    except OSError:  # an old kernel, or a sandbox
        return False
    return True
