"""A nursery of service processes: one process imports everything once, and each service is a fork of it.

`python -m tests.nursery FD MODULE...` is that process; `Nursery` starts it and asks it for children. A child is a
process as any other: it runs a `baton` command from its first line to the interpreter's end, under its own pid, with
its own log. What it is spared is five seconds of importing torch and transformers. No thread may run when it is born,
and no library may be at work (grpc, NIXL and uvloop begin with their first use), so that nothing half done is
inherited.

The nursery dies with whoever started it, and its children with the nursery.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SERVICES = ("services.router.app", "services.prefill.app", "services.decode.app")
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0
MAX_ORDER_BYTES = 65536


@dataclass
class Child:
    """What tests use of `subprocess.Popen`, for a process whose parent is the nursery."""

    pid: int
    _end: socket.socket = field(repr=False)
    """Brings the exit code, once."""
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs; a signal's number is negative."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"child {self.pid}", timeout)
            self.returncode = int(self._end.recv(64) or -signal.SIGKILL)  # nothing: it went with its nursery
            self._end.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing to one that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The client's end. One thread at a time. `preloaded`: modules that children need not import themselves."""

    def __init__(self, preloaded: Sequence[str] = SERVICES) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.nursery", str(theirs.fileno()), "services.cli.main", *preloaded]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._orders.settimeout(START_TIMEOUT_S)
        assert self._orders.recv(64) == b"ready", "the nursery has ended"
        self._orders.settimeout(ANSWER_TIMEOUT_S)

    def spawn(self, name: str, tokens: Sequence[str], log: Path) -> Child:
        """Runs `baton` with `tokens`; its output goes to a new file `log`, and it is called `name` in `ps -o comm`."""
        end, theirs = socket.socketpair()
        with log.open("wb") as out, theirs:
            order = json.dumps({"name": name, "tokens": list(tokens)}).encode()
            socket.send_fds(self._orders, [order], [out.fileno(), theirs.fileno()])
        return Child(int(self._orders.recv(64)), end)

    def close(self) -> None:
        """Ends the nursery and all children that are left. Idempotent."""
        self._orders.close()
        self._process.wait(ANSWER_TIMEOUT_S)


@functools.cache
def shared() -> Nursery:
    """This process's own, which begins when it is first asked for and ends with the process."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


@dataclass(frozen=True, slots=True)
class _Order:
    """What a child is to become."""

    name: str
    tokens: list[str]
    log: int

    def become(self) -> int:
        """Runs the command in this process; its exit code."""
        Path("/proc/self/comm").write_text(self.name)
        os.dup2(self.log, 1)
        os.dup2(self.log, 2)
        os.close(self.log)
        return int(importlib.import_module("services.cli.main").run(self.tokens))


class _Server:
    """The nursery's own life: orders in, pids out, exit codes as they come."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._watch = selectors.DefaultSelector()
        self._ends: dict[int, tuple[int, socket.socket]] = {}  # by the child's pidfd

    def serve(self) -> _Order | None:
        """None in the nursery, when nobody orders any more; in every child what it is to become."""
        self._watch.register(self._orders, selectors.EVENT_READ)
        self._orders.send(b"ready")
        while True:
            for key, _ in self._watch.select():
                if key.fileobj is not self._orders:
                    self._bury(key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._orders, MAX_ORDER_BYTES, 2)
                if not message:
                    self._close()
                    return None
                order = _Order(log=descriptors[0], **json.loads(message))
                if self._give_birth(socket.socket(fileno=descriptors[1])):
                    return order
                os.close(order.log)

    def _give_birth(self, end: socket.socket) -> bool:
        """Whether this is the child."""
        assert len(os.listdir("/proc/self/task")) == 1, "a thread runs here: what it does would be inherited half done"
        pid = os.fork()
        if pid == 0:
            self._forget_all(end)
            return True
        pidfd = os.pidfd_open(pid)
        self._ends[pidfd] = (pid, end)
        self._watch.register(pidfd, selectors.EVENT_READ)
        self._orders.send(str(pid).encode())
        return False

    def _forget_all(self, end: socket.socket) -> None:
        """A child keeps nothing of the nursery's."""
        self._watch.close()
        self._orders.close()
        end.close()
        for pidfd, (_, other) in self._ends.items():
            os.close(pidfd)
            other.close()

    def _bury(self, pidfd: int) -> None:
        pid, end = self._ends.pop(pidfd)
        self._watch.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with end, contextlib.suppress(OSError):  # nobody may want to know any more
            end.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _close(self) -> None:
        for pidfd in list(self._ends):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._bury(pidfd)


def main() -> int:
    """Command line."""
    descriptor, *preloaded = sys.argv[1:]
    orders = socket.socket(fileno=int(descriptor))
    for name in preloaded:
        importlib.import_module(name)
    gc.freeze()  # what is here stays: children share it, and never look at it again
    order = _Server(orders).serve()
    return 0 if order is None else order.become()


if __name__ == "__main__":
    sys.exit(main())
