"""The process of a fork server: how it is started, and the socket to it. Standard library only.

`baton up` forks it from itself as soon as it has imported what both need (`start_early`), and hands it to
`ServiceForkServer` later. Where it cannot be forked, and once `baton up` has threads, it is started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, NoReturn

from baton.services.cli.processes import die_with_parent
from baton.services.cli.processes.interrupts import SIGNALS

PROGRAM = "baton.services.cli.processes.fork_program"
MIN_ARGUMENT_BYTES = 4096
"""Room for what `ps` shows of a fork."""
FIRST_SERVICE = "router"
"""The service that `baton up` forks first: its modules are imported before anybody asks."""
_POLL_INTERVAL_S = 0.01
_NOT_STARTING = frozenset({"--help", "-h", "--version"})


class ForkedServer:
    """The part of `subprocess.Popen` that is used, for a fork server that this process has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """The exit code; None while it runs. That of a signal is negative."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, within `timeout` seconds. Raises `subprocess.TimeoutExpired`. For callers in any thread."""
        with self._reaping:
            if self.returncode is not None:
                return self.returncode
            try:
                pidfd = os.pidfd_open(self.pid)
            except (OSError, AttributeError):  # refused, or too many files are open
                pidfd = -1
        if pidfd < 0:
            return self._poll_until_end(math.inf if timeout is None else timeout)
        try:
            if not select.select([pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
        finally:
            os.close(pidfd)
        with self._reaping:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode

    def _poll_until_end(self, timeout: float) -> int:
        """As `wait`, without a descriptor of the process."""
        deadline_s = time.monotonic() + timeout
        while True:
            with self._reaping:
                if self.returncode is None:
                    ended, status = os.waitpid(self.pid, os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if ended else None
                if self.returncode is not None:
                    return self.returncode
            if time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired("fork server", timeout)
            time.sleep(_POLL_INTERVAL_S)

    def kill(self) -> None:
        """Sends SIGKILL; no effect after its end."""
        with self._reaping:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ForkProcess:
    """A running `fork_program`. `requests`: the socket to it, which does not block.

    `output`: what it writes to before it gets a log; None for one that has a log from the beginning.
    """

    popen: subprocess.Popen[bytes] | ForkedServer
    requests: socket.socket
    output: IO[bytes] | None = None

    def end(self) -> None:
        """Ends the process, and keeps its output. Its forks go on. Idempotent."""
        self.requests.close()
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        """Ends the process, and drops its output. Its forks go on. Idempotent."""
        self.end()
        if self.output is not None:
            self.output.close()


def start_process(
    output: IO[bytes], num_bytes: int, environment: Mapping[str, str] | None = None, services: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the program, which ends with this thread. Returns the process, and the socket to it. Raises `OSError`.

    `num_bytes`: room for the arguments of its forks. `environment`: None: that of this process. `services`: those
    whose modules are imported before a request comes.
    """
    requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wrapper = (sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()))
    program = (sys.executable, "-m", PROGRAM, str(other.fileno()), str(os.getpid()), ",".join(services))
    with other:
        popen = subprocess.Popen(
            (*wrapper, *program, "." * num_bytes),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[other.fileno()],
            process_group=0,
        )
    requests.setblocking(False)
    return popen, requests


def fork_process(output: IO[bytes], num_bytes: int, services: Sequence[str]) -> tuple[ForkedServer, socket.socket]:
    """Forks the program from this process: what both have imported is in memory once. As `start_process` otherwise.

    On the main thread, the only one. Objects of this process are exempt from garbage collection from now on: a
    collection would copy their pages. The fork inherits no descriptor but `output`. Raises `OSError`.
    """
    requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()  # not a second time, by the fork
    gc.freeze()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with other:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a handler would raise in the fork, beside its program
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                requests.close()
                _become_program(output, other.detach(), parent, num_bytes, services)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError):  # it has done so by itself, or has ended
        os.setpgid(pid, pid)
    requests.setblocking(False)
    return ForkedServer(pid), requests


def _become_program(output: IO[bytes], requests: int, parent: int, num_bytes: int, services: Sequence[str]) -> NoReturn:
    """Runs the program in a fork. Never returns to the caller.

    As a started one it leads a group, and has the standard streams and `requests` open, nothing else: a lock or a pipe
    that `baton up` has inherited is no matter of services.
    """
    code: str | int | None = 1
    try:
        os.setpgid(0, 0)
        die_with_parent.end_with_parent(parent, signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        output.close()
        _close_all_but(0, 1, 2, requests)
        importlib.import_module(PROGRAM).run(requests, parent, services, num_bytes)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # the root of this process
        traceback.print_exc()
    finally:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        finally:  # also where nobody can be told
            os._exit(code if isinstance(code, int) else 1)


def can_watch_processes() -> bool:
    """True where a process can be waited for, and gets signals, by a descriptor: on Linux since 5.3.

    A sandbox may refuse the calls, and a Python may have been built without them.
    """
    try:
        pidfd = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(pidfd, 0)  # tests only that it could
        finally:
            os.close(pidfd)
    except (OSError, AttributeError):
        return False
    return True


def _close_all_but(*kept: int) -> None:
    """Closes the other descriptors of this process."""
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))).difference(kept):
        with contextlib.suppress(OSError):  # that of the list is closed
            os.close(descriptor)


def _can_be_forked() -> bool:
    """True while this process has one thread and all standard streams, where forks can be watched.

    In place of a closed stream the fork's own files would be opened, and then replaced by its output.
    """
    return len(os.listdir("/proc/self/task")) == 1 and _streams_are_open() and can_watch_processes()


def _streams_are_open() -> bool:
    try:
        for number in range(3):
            os.fstat(number)
    except OSError:
        return False
    return not any(stream is None or stream.closed for stream in (sys.stdin, sys.stdout, sys.stderr))


_early: list[ForkProcess] = []
"""What `start_early` has started, until somebody takes it."""


def start_early(words: Sequence[str]) -> None:
    """Forks or starts a fork server for a command line, without the program's name, that will need one.

    On the main thread. No effect for other command lines, on other systems than Linux, and where it cannot be started:
    `ServiceForkServer` tells why.
    """
    if not wants_early(words):
        return
    try:
        can_be_forked = _can_be_forked()  # before a file takes the place of a closed stream
        output = os.fdopen(os.memfd_create(PROGRAM), "w+b")
        num_bytes = 4 * MIN_ARGUMENT_BYTES + sum(len(os.fsencode(word)) for word in words)
        if can_be_forked:
            process = ForkProcess(*fork_process(output, num_bytes, [FIRST_SERVICE]), output)
        else:
            process = ForkProcess(*start_process(output, num_bytes, None, [FIRST_SERVICE]), output)
        _early.append(process)
    except (OSError, AttributeError):  # some builds of Python lack `memfd_create`
        pass


def wants_early(words: Sequence[str]) -> bool:
    """True for a command line, without the program's name, that `start_early` starts a fork server for."""
    return words[:1] == ["up"] and not _NOT_STARTING.intersection(words) and sys.platform == "linux"


def take_early() -> ForkProcess | None:
    """What `start_early` has started, for the caller to close; None if it started nothing."""
    return _early.pop() if _early else None


def close_early() -> None:
    """Ends what nobody has taken."""
    if (process := take_early()) is not None:
        process.close()
