"""The bundled Redis of the chart: its start script runs, wants the password, hides it, and keeps what it answered."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import redis

from baton.services.cli.processes.local_redis import find_server
from tests.redis_server import require_redis
from tests.unit.deploy.chart import component, container, render, workloads

PASSWORD = "kQ7wPz0aVb9yTn3x"


@pytest.fixture
def script(tmp_path) -> str:
    """The container's command with folders of this machine, and a socket instead of a port."""
    (store,) = (each for each in workloads(render()) if component(each) == "redis")
    shell, flag, text = container(store)["command"]
    assert (shell, flag) == ("sh", "-c")
    here = f"--port 0 --unixsocket {tmp_path}/redis.sock --dir {tmp_path}"
    assert text.count("--dir /data") == 1
    return text.replace("--dir /data", here)


@contextlib.contextmanager
def running(script: str, folder: Path):
    """Starts the command with `redis-server` on PATH; kills it at the end."""
    require_redis()
    server = find_server()
    assert server is not None
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (programs / "redis-server").symlink_to(server)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "REDIS_PASSWORD": PASSWORD}
    with subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def connect(folder: Path, password: str | None = PASSWORD) -> redis.Redis:
    client = redis.Redis(unix_socket_path=f"{folder}/redis.sock", password=password, socket_timeout=5)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.ConnectionError):
            if password is None or client.ping():
                return client
        time.sleep(0.02)
    raise AssertionError("redis-server did not start")


def test_the_store_wants_its_password_and_survives_a_kill(script, tmp_path):
    with running(script, tmp_path) as process, connect(tmp_path) as client:
        client.set("kept", "yes")
        assert client.config_get("append*")["appendonly"] == "yes"
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        with connect(tmp_path, password=None) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.get("kept")
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"redis-server" in command, "the shell is not in the way of SIGTERM"
        assert PASSWORD.encode() not in command
    with running(script, tmp_path), connect(tmp_path) as client:
        assert client.get("kept") == b"yes"
