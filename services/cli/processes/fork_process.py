"""The process of a fork server: how it is started, and the socket to it. Standard library only.

`baton up` starts it before it imports anything else (`start_early`), and hands it to `ServiceForkServer` later.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from baton.services.cli.processes import die_with_parent

PROGRAM = "baton.services.cli.processes.fork_program"
MIN_ARGUMENT_BYTES = 4096
"""Room for what `ps` shows of a fork."""
FIRST_SERVICE = "router"
"""The service that `baton up` forks first: its modules are imported before anybody asks."""
_NOT_STARTING = frozenset({"--help", "-h", "--version"})


@dataclass(frozen=True, slots=True)
class ForkProcess:
    """A running `fork_program`. `requests`: the socket to it, which does not block.

    `output`: what it writes to before it gets a log; None for one that has a log from the beginning.
    """

    popen: subprocess.Popen[bytes]
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


_early: list[ForkProcess] = []
"""What `start_early` has started, until somebody takes it."""


def start_early(words: Sequence[str]) -> None:
    """Starts a fork server for a command line, without the program's name, that will need one. On the main thread.

    No effect for other command lines, on other systems than Linux, and where it cannot be started: `ServiceForkServer`
    tells why.
    """
    if words[:1] != ["up"] or _NOT_STARTING.intersection(words) or sys.platform != "linux":
        return
    try:
        output = os.fdopen(os.memfd_create(PROGRAM), "w+b")
        num_bytes = 4 * MIN_ARGUMENT_BYTES + sum(len(os.fsencode(word)) for word in words)
        _early.append(ForkProcess(*start_process(output, num_bytes, None, [FIRST_SERVICE]), output))
    except (OSError, AttributeError):  # some builds of Python lack `memfd_create`
        pass


def take_early() -> ForkProcess | None:
    """What `start_early` has started, for the caller to close; None if it started nothing."""
    return _early.pop() if _early else None


def close_early() -> None:
    """Ends what nobody has taken."""
    if (process := take_early()) is not None:
        process.close()
