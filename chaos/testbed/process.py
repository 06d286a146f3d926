"""One `baton serve` as a child process: started from the command line or forked, killed, stopped, continued, measured.

`cluster` owns them. A process dies with its parent. Linux only: resources are read from /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.services.cli.processes import die_with_parent
from baton.settings.process import child_environment, thread_variables
from chaos.testbed.fork_server import SERVICE, ForkedProcess, ForkServer

ROOT = Path(__file__).resolve().parents[2]
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessResources:
    """Resources of a process."""

    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(slots=True)
class ChildProcess:
    """`address` is its HTTP (router) or gRPC (worker) host and port, `metrics_address` where it is scraped.

    `expected_running`: False once it was killed on purpose. `was_ready`: it has been in service.
    """

    name: str
    role: str
    address: tuple[str, int]
    metrics_address: tuple[str, int]
    log: Path
    popen: subprocess.Popen[bytes] | ForkedProcess
    expected_running: bool = True
    stopped: bool = False
    was_ready: bool = False

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def url(self) -> str:
        """A router's."""
        return "http://{}:{}".format(*self.address)

    def kill(self) -> None:
        """Sends SIGKILL and reaps the process."""
        self.expected_running = False
        self.popen.kill()
        self.popen.wait()

    def may_leave(self) -> None:
        """Expects the process to end by itself from now on, perhaps; it is restarted then."""
        self.expected_running = self.was_ready = False

    def stop(self) -> None:
        """Sends SIGSTOP."""
        self.stopped = True
        self.popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Sends SIGCONT; harmless if it was not stopped."""
        self.stopped = False
        if self.running:
            self.popen.send_signal(signal.SIGCONT)

    def resources(self) -> ProcessResources:
        """Present resources. Raises `FileNotFoundError` if it has ended."""
        return resources_of(self.pid)

    def tail(self, num_lines: int = 25) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def resources_of(pid: int) -> ProcessResources:
    """Resources of a process. Raises `FileNotFoundError` if it does not exist."""
    proc = Path(f"/proc/{pid}")
    resident_pages = int((proc / "statm").read_text().split()[1])
    return ProcessResources(resident_pages * _PAGE_BYTES, len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")))


def spawn(
    name: str,
    role: str,
    flags: Mapping[str, object],
    addresses: tuple[tuple[str, int], tuple[str, int]],
    folder: Path,
    environment: Mapping[str, str],
    fork_server: ForkServer | None = None,
) -> ChildProcess:
    """Starts `baton serve ROLE` with `flags`; its output goes to a new file in `folder`.

    `addresses`: where it serves, and where it is scraped. `environment`: further variables; a fork of `fork_server`
    does not get them.
    """
    arguments = [f"--{key}={value}" for key, value in flags.items()]
    log = folder / f"{name}-{time.monotonic_ns()}.log"
    if fork_server is not None:
        child = fork_server.spawn(name, ["serve", role, *arguments], log, program=SERVICE)
        return ChildProcess(name, role, *addresses, log, child)
    wrapper = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
    command = [*wrapper, sys.executable, "-m", "baton.services.cli.main", "serve", role, *arguments]
    with log.open("wb") as out:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=child_environment({**thread_variables(1), "PYTHONUNBUFFERED": "1", **environment}),
            cwd=ROOT,
            start_new_session=True,
        )
    return ChildProcess(name, role, *addresses, log, popen)


def end_all(processes: list[ChildProcess], timeout_s: float) -> None:
    """Sends SIGTERM to all, and SIGKILL to those that remain after `timeout_s`."""
    living = [process for process in processes if process.running]
    for process in living:
        process.expected_running = False
        process.resume()
        process.popen.terminate()
    deadline = time.monotonic() + timeout_s
    for process in living:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
