"""The fork server of the tests' clusters: its children are ordinary processes and end with it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chaos.testbed.fork_server import ForkServer
from tests.cluster import eventually

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
WAITS_FOR_EVER = ("serve", "router", "--model=bundled", "--port=0", "--metrics-port=0", "--redis-url=memory://")


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer(["baton.services.router.app"])
    yield fork_server
    fork_server.close()


def test_a_child_has_a_log_and_an_exit_code(fork_server: ForkServer, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    assert fork_server.spawn("good", ["--version"], good).wait(TIMEOUT_S) == 0
    assert good.read_text().strip().replace(".", "").isdigit()
    assert fork_server.spawn("bad", ["serve", "router", "--nonsense=1"], bad).wait(TIMEOUT_S) == 2
    assert "--nonsense" in bad.read_text()


def test_a_child_may_run_another_program(fork_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = fork_server.spawn(
        "other", ["a", "b"], log, {"MARK": "7"}, program="tests.integration.operations.echo_program"
    )
    assert child.wait(TIMEOUT_S) == 7
    assert log.read_text() == "a b\n"


def open_descriptors() -> set[str]:
    """What this process has open, by inode."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if os.path.islink(link)}


def test_a_forgotten_child_leaves_no_descriptor_open(fork_server: ForkServer, tmp_path: Path) -> None:
    fork_server.spawn("first", ["--version"], tmp_path / "first").wait(TIMEOUT_S)
    before = open_descriptors()
    fork_server.spawn("second", ["--version"], tmp_path / "second")
    gc.collect()
    assert open_descriptors() <= before  # a collection may close some of other tests


def test_many_threads_hear_of_the_same_end(fork_server: ForkServer, tmp_path: Path) -> None:
    """A monitor polls a process that another thread kills. All get one exit code, however they interleave."""
    child = fork_server.spawn("child", WAITS_FOR_EVER, tmp_path / "log")
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(child.wait, TIMEOUT_S) for _ in range(8)]
        child.kill()
        assert {one.result() for one in waiting} == {-signal.SIGKILL}


def test_children_get_signals_and_end_with_their_server(fork_server: ForkServer, tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    terminated, killed, left = (fork_server.spawn(log.stem, WAITS_FOR_EVER, log) for log in logs)
    eventually(lambda: all("router_listening" in log.read_text() for log in logs), TIMEOUT_S, "all of them run")
    with pytest.raises(subprocess.TimeoutExpired):
        left.wait(0.0)
    terminated.terminate()
    killed.kill()
    assert (terminated.wait(TIMEOUT_S), killed.wait(TIMEOUT_S)) == (0, -signal.SIGKILL)
    fork_server.close()
    assert left.wait(TIMEOUT_S) == -signal.SIGKILL
    assert not Path(f"/proc/{left.pid}").exists()
