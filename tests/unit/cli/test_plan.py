"""`baton serve` accepts the command lines that `baton up` makes."""

import errno
import socket
import sys
from pathlib import Path

import pytest

from baton.settings.groups import ServiceSettings
from services.cli import serve
from services.cli.main import run
from services.cli.plan import SharedFlags, callable_host, free_ports, make_plan, share_cores
from services.cli.settings import UpSettings

SHARED = SharedFlags("unix:///tmp/s", Path("/tmp/s.secret"))


@pytest.fixture
def served(monkeypatch):
    """The services that `baton serve` would run."""
    runs: dict[int, tuple[str, ServiceSettings]] = {}

    def note(name, settings) -> int:
        runs[settings.port] = (name, settings)
        return 0

    monkeypatch.setattr(serve, "_serve", note)
    return runs


def test_every_command_is_accepted_by_serve_with_its_settings(served):
    settings = UpSettings(prefill=2, decode=1, port=0, page_size=32, dtype="float32", transport="stream", model="m")
    plan = make_plan(settings, SHARED, cores=[0, 1])
    assert [command.name for command in plan.commands] == ["prefill-0", "prefill-1", "decode-0", "router"]
    for command in plan.commands:
        assert command.arguments[:3] == (sys.executable, "-m", "services.cli.main")
        assert run(command.arguments[3:]) == 0
    assert [name for name, _ in served.values()] == ["prefill", "prefill", "decode", "router"]
    *workers, router = [settings for _, settings in served.values()]
    assert [worker.worker_id for worker in workers] == ["prefill-0", "prefill-1", "decode-0"]
    assert [worker.cpu_affinity for worker in workers] == ["0", "1", "0"]
    for worker in workers:
        assert (worker.page_size, worker.dtype, worker.transport) == (32, "float32", "stream")
        assert worker.advertised(0) == f"127.0.0.1:{worker.port}"
    assert plan.router_url == f"http://127.0.0.1:{router.port}"
    metrics = [f"http://127.0.0.1:{worker.metrics_port}/metrics" for worker in workers]
    assert (*plan.prefill_metrics, *plan.decode_metrics) == tuple(metrics)
    assert {settings.redis_url for _, settings in served.values()} == {"unix:///tmp/s"}
    assert {settings.cluster_secret_file for _, settings in served.values()} == {SHARED.secret_file}
    assert {settings.model for _, settings in served.values()} == {"m"}


def test_without_prefill_workers_decode_workers_prefill_for_themselves(served):
    plan = make_plan(UpSettings(prefill=0, decode=2, decode_token_budget=64, port=0), SHARED, cores=[0, 1])
    assert [command.name for command in plan.commands] == ["decode-0", "decode-1", "router"]
    for command in plan.commands:
        assert run(command.arguments[3:]) == 0
    *workers, _ = [settings for _, settings in served.values()]
    assert [(worker.token_budget, worker.cpu_affinity) for worker in workers] == [(64, "0"), (64, "1")]
    assert plan.prefill_metrics == ()
    with pytest.raises(ValueError, match="without prefill workers"):
        UpSettings(prefill=0)


def test_a_busy_port_is_found_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match=f"HTTP port {port}") as caught:
            make_plan(UpSettings(port=port), SHARED, cores=[0])
        assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize(
    ("cores", "workers", "threads", "shares"),
    [
        ([0, 1], 2, 1, ["0", "1"]),
        ([4], 2, 1, ["4", "4"]),
        ([0, 1, 2, 3], 2, 2, ["0,1", "2,3"]),
        ([0, 1], 2, 3, ["0,1", "0,1"]),
    ],
)
def test_cores_are_shared_only_when_there_are_too_few(cores, workers, threads, shares):
    assert share_cores(cores, workers, threads) == shares


def test_free_ports_differ():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(1024 <= port <= 65535 for port in ports)


def test_a_wildcard_interface_is_reached_by_loopback():
    assert callable_host("0.0.0.0") == "127.0.0.1"
    assert callable_host("10.0.0.7") == "10.0.0.7"
