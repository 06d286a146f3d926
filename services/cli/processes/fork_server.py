"""Starts services as forks of one process that has imported everything: the client of `fork_program`.

Called by `Supervisor`. A fork shares the memory of imports with the others and spends no time on them. It has its own
process group, log, arguments for `ps` and end, as a started process has: only `pid` tells that another forked it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from baton.services.cli.errors import StartFailed
from baton.services.cli.processes import die_with_parent
from baton.services.cli.processes.child_command import ChildCommand, log_tail
from baton.services.cli.processes.orphans import adopt_orphans
from baton.settings.process import child_environment

PROGRAM = "baton.services.cli.processes.fork_program"
LOG_NAME = "fork-server.log"
MIN_ARGUMENT_BYTES = 4096
"""Room for what `ps` shows of a fork."""
MAX_ANSWER_BYTES = 4096
NUMPY_THREADS: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}
"""OpenBLAS starts its threads when it is loaded, and a fork would lose them. Nothing of a step runs there."""
END_TIMEOUT_S = 5.0
"""Longest wait for the end of a fork server that has closed its socket."""
FORK_TIMEOUT_S = 120.0
"""Longest wait for one fork, with the imports before it."""


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
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL; no effect after its end."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
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

    def __init__(self, commands: Iterable[ChildCommand], log_dir: Path) -> None:
        """Forks those of `commands` that `takes` accepts."""
        found = [command for command in commands if command.words]
        self._variables = found[0].variables if found else {}
        self._num_bytes = max([MIN_ARGUMENT_BYTES, *(len(" ".join(command.arguments)) for command in found)])
        self._log = log_dir / LOG_NAME
        self._popen: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._is_ready = False

    def takes(self, command: ChildCommand) -> bool:
        """True for a service with the variables that the libraries of the fork server were loaded with."""
        return bool(command.words) and command.variables == self._variables

    def start(self) -> None:
        """Starts the process; no effect while it runs. On the main thread, with which it ends.

        Raises `OSError` where processes cannot be adopted, or the log cannot be written.
        """
        if self._popen is not None:
            return
        adopt_orphans()
        requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wrapper = (sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()))
        program = (sys.executable, "-m", PROGRAM, str(other.fileno()), str(os.getpid()))
        with other, self._log.open("ab") as output:
            self._popen = subprocess.Popen(
                (*wrapper, *program, "." * self._num_bytes),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment({**self._variables, **NUMPY_THREADS}),
                pass_fds=[other.fileno()],
                process_group=0,
            )
        requests.setblocking(False)
        self._requests, self._is_ready = requests, False

    async def fork(self, command: ChildCommand, output: int) -> ForkedService:
        """Starts a service; its output goes to the open file `output`.

        A fork server that has ended since it was ready is started once more. Raises `StartFailed` with its last lines
        if it ends before, or if it does not answer within `FORK_TIMEOUT_S`, and `NotForked` if it cannot fork now.
        Cancelled, it ends the fork server, and with it a fork that this process does not know yet.
        """
        for is_last in (not self._is_ready, True):
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
                    why = await self._end_report()
                finally:
                    self.close()
                if is_last:
                    raise StartFailed(why) from error
            except BaseException:  # an answer may be on its way
                self.close()
                raise
        raise AssertionError("unreachable")

    async def _fork(self, command: ChildCommand, output: int) -> ForkedService:
        if not self._is_ready:
            await self._answer()
            self._is_ready = True
        assert self._requests is not None
        start, other = socket.socketpair()
        with start, other:
            request = json.dumps(command.words).encode()
            socket.send_fds(self._requests, [request], [output, other.fileno()])
            answer = await self._answer()
            if "pid" not in answer:
                raise NotForked(str(answer.get("why")))
            process = ForkedService(int(answer["pid"]))
            start.send(b"1")
        return process

    async def _answer(self) -> dict[str, Any]:
        """The next answer. Raises `ConnectionError` if the fork server has ended."""
        assert self._requests is not None
        message = await asyncio.get_running_loop().sock_recv(self._requests, MAX_ANSWER_BYTES)
        if not message:
            raise ConnectionResetError("the fork server has ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    async def _end_report(self) -> str:
        assert self._popen is not None
        try:
            code: int | str = await asyncio.to_thread(self._popen.wait, END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = "unknown"
        return f"the fork server ended by itself with exit code {code}. Its last log lines:\n{log_tail(self._log)}"

    def close(self) -> None:
        """Ends the fork server. Its forks go on. Idempotent."""
        if self._popen is not None and self._requests is not None:
            self._requests.close()
            self._popen.kill()
            self._popen.wait()
        self._popen = self._requests = None


def can_fork() -> bool:
    """True where services can be forked: on Linux, with what adopting a process needs."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        adopt_orphans()
    except OSError:  # an old kernel, or a sandbox
        return False
    return True
