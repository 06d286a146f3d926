"""A fork server of service processes: one process imports everything once and forks each service.

`python -m chaos.testbed.fork_server FD MODULE...` is that process; `ForkServer` starts it and asks for children. A
child runs a `baton` command, or another program, from its first line to the process's end, with its own pid and log.
It saves five seconds of importing torch and transformers, and the check of the native kernels. The tests and the storms
of kills use it. No thread may run before a fork, and no library may be active (grpc, NIXL and uvloop start with their
first use): a child would inherit half of its work.

The fork server ends with the process that started it, and its children end with it.
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
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.settings.process import end_process

SERVICES = ("baton.services.router.app", "baton.services.prefill.app", "baton.services.decode.app")
CHECKPOINT_LOADING = (
    "torch._dynamo",
    "transformers.conversion_mapping",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What a worker imports only when it loads a checkpoint; the last is the bundled model's."""
BATON = "baton.services.cli.main"
"""The program of a child, unless another one is named: its `run` gets the words and returns the exit code."""
SERVICE = "chaos.testbed.service"
"""A program for `serve` only, which costs less to start."""
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0
MAX_REQUEST_BYTES = 65536


@dataclass
class ForkedProcess:
    """The part of `subprocess.Popen` that is used, for a process whose parent is the fork server."""

    pid: int
    _exit_fd: int = field(repr=False)
    """Receives the exit code, once. A raw descriptor: a socket that is collected unclosed warns."""
    returncode: int | None = None
    _reading: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def poll(self) -> int | None:
        """The exit code, or None while it runs; signals are negative."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`. Several threads may wait."""
        if self.returncode is None and not select.select([self._exit_fd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"child {self.pid}", timeout or 0.0)
        with self._reading:
            if self.returncode is None:  # nothing is read if it ended with its fork server
                self.returncode = int(os.read(self._exit_fd, 64) or -signal.SIGKILL)
        return self.returncode

    def __del__(self) -> None:
        os.close(self._exit_fd)  # not earlier: another thread may be about to wait on it

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client's end, for one thread. `preloaded`: modules that the server imports for its children."""

    def __init__(self, preloaded: Sequence[str] = (*SERVICES, *CHECKPOINT_LOADING)) -> None:
        self._requests, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable,
            "-m",
            "chaos.testbed.fork_server",
            str(child_socket.fileno()),
            BATON,
            *preloaded,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[child_socket.fileno()], env=environment
        )
        child_socket.close()
        self._requests.settimeout(START_TIMEOUT_S)
        assert self._requests.recv(64) == b"ready", "the fork server has ended"
        self._requests.settimeout(ANSWER_TIMEOUT_S)

    def spawn(
        self,
        name: str,
        tokens: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        program: str = BATON,
    ) -> ForkedProcess:
        """Runs `baton` with `tokens`; its output goes to a new file `log`, and `ps -o comm` shows `name`.

        `environment`: variables beside those of this server. `program`: the module whose `run` is called instead.
        """
        exit_socket, child_socket = socket.socketpair()
        with log.open("wb") as out, child_socket:
            request = json.dumps(
                {"name": name, "tokens": list(tokens), "environment": dict(environment or {}), "program": program}
            ).encode()
            socket.send_fds(self._requests, [request], [out.fileno(), child_socket.fileno()])
        return ForkedProcess(int(self._requests.recv(64)), exit_socket.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends the fork server and all children. Idempotent."""
        self._requests.close()
        self._process.wait(ANSWER_TIMEOUT_S)


@functools.cache
def shared_fork_server() -> ForkServer:
    """The fork server of this process, created on first use; it ends with the process."""
    fork_server = ForkServer()
    atexit.register(fork_server.close)
    return fork_server


@dataclass(frozen=True, slots=True)
class _SpawnRequest:
    """Description of a child process."""

    name: str
    tokens: list[str]
    environment: dict[str, str]
    log: int
    program: str

    def run(self) -> int:
        """Runs the command in this process; returns its exit code."""
        Path("/proc/self/comm").write_text(self.name)
        os.environ.update(self.environment)
        os.dup2(self.log, 1)
        os.dup2(self.log, 2)
        os.close(self.log)
        return int(importlib.import_module(self.program).run(self.tokens))


class _ServerLoop:
    """The server's loop: receives requests, returns pids and exit codes."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._selector = selectors.DefaultSelector()
        self._exit_sockets: dict[int, tuple[int, socket.socket]] = {}  # by the child's pidfd

    def serve(self) -> _SpawnRequest | None:
        """Returns None in the server after the last request, and in every child its request."""
        self._selector.register(self._requests, selectors.EVENT_READ)
        self._requests.send(b"ready")
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._requests:
                    self._reap(key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._requests, MAX_REQUEST_BYTES, 2)
                if not message:
                    self._close()
                    return None
                request = _SpawnRequest(log=descriptors[0], **json.loads(message))
                if self._fork(socket.socket(fileno=descriptors[1])):
                    return request
                os.close(request.log)

    def _fork(self, exit_socket: socket.socket) -> bool:
        """True in the child."""
        assert len(os.listdir("/proc/self/task")) == 1, "a thread runs here: what it does would be inherited half done"
        pid = os.fork()
        if pid == 0:
            self._close_inherited(exit_socket)
            return True
        pidfd = os.pidfd_open(pid)
        self._exit_sockets[pidfd] = (pid, exit_socket)
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._requests.send(str(pid).encode())
        return False

    def _close_inherited(self, exit_socket: socket.socket) -> None:
        """Closes everything that a child inherits from the server."""
        self._selector.close()
        self._requests.close()
        exit_socket.close()
        for pidfd, (_, other) in self._exit_sockets.items():
            os.close(pidfd)
            other.close()

    def _reap(self, pidfd: int) -> None:
        pid, exit_socket = self._exit_sockets.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with exit_socket, contextlib.suppress(OSError):  # the waiter may be gone
            exit_socket.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _close(self) -> None:
        for pidfd in list(self._exit_sockets):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._reap(pidfd)


def preload(modules: Sequence[str]) -> None:
    """Imports `modules`, and does what their first use would do in every child. Starts no thread.

    Checks the native kernels, and compiles the patterns by which transformers renames weights.
    """
    for name in modules:
        importlib.import_module(name)
    if (kernels := sys.modules.get("baton.model.loading.kernel_choice")) is not None:
        kernels.choose_kernels(kernels.KernelUse.AUTO, "cpu")
    if (conversions := sys.modules.get("transformers.conversion_mapping")) is not None:
        conversions.get_checkpoint_conversion_mapping("llama")


def main() -> int:
    """Runs the server."""
    descriptor, *preloaded = sys.argv[1:]
    requests = socket.socket(fileno=int(descriptor))
    preload(preloaded)
    gc.freeze()  # children share these objects; collecting them would copy pages
    request = _ServerLoop(requests).serve()
    if request is not None:
        end_process(request.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
