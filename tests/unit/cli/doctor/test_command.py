"""`baton doctor` as a command: its lines, its JSON, its exit code, and checks that fail themselves."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.services.cli.doctor import command, ports, probes
from baton.services.cli.doctor.probes import ProbeAnswer
from baton.services.cli.doctor.results import CheckStatus
from baton.services.cli.main import run
from baton.services.cli.processes.ports import free_ports
from baton.services.cli.settings import COMMANDS
from baton.settings.base import known_variables
from baton.store.connect import connect
from tests.redis_server import running_redis
from tests.unit.cli.doctor.test_probes import ENGINE, PULLED

FACTS = ENGINE | {"cuda_build": None, "gpus": [], "gpu_error": ""}


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch):
    """Probes that answer at once; `test_probes.py` runs real ones."""
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)

    async def engine() -> ProbeAnswer:
        return ProbeAnswer(FACTS)

    async def loopback() -> ProbeAnswer:
        return ProbeAnswer(PULLED)

    monkeypatch.setattr(probes, "ask_engine", engine)
    monkeypatch.setattr(probes, "ask_loopback", loopback)


def checks(out: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(out)["checks"]}


def test_json_has_every_check_and_the_exit_code_follows(capsys, monkeypatch):
    assert run(["doctor", "--json", "--port", str(free_ports(1)[0]), "--model", "bundled"]) == 0
    names = set(checks(capsys.readouterr().out))
    assert names >= {"python", "packages", "cpu", "memory", "rdma", "memlock", "huge pages", "kernels", "gpu", "model"}
    assert names >= {"nixl loopback", "redis"}


def test_a_busy_port_fails_with_a_fix(capsys):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert run(["doctor", "--port", str(port)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert line.startswith(f"FAIL port {port}: in use")
    assert "choose another: --port" in line


class Ready(BaseHTTPRequestHandler):
    """Answers `/ready` with the server's `body`."""

    def do_GET(self) -> None:
        body = self.server.body if self.path == "/ready" else b"{}"  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing a request."""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"status": "ready", "detail": "1 linked prefill/decode pairs; kernels: avx2"}', CheckStatus.OK),
        (b'{"status": "ready", "detail": "of another server"}', CheckStatus.FAIL),
        (b"[]", CheckStatus.FAIL),
        (b"<html>", CheckStatus.FAIL),
    ],
)
def test_the_port_of_a_running_baton_is_no_failure(body: bytes, expected: CheckStatus):
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        server.body = body  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            (result,) = ports.check_ports("127.0.0.1", {"--port": server.server_port}, required="--port")
        finally:
            server.shutdown()
            thread.join()
    assert result.status is expected
    assert ("1 linked" in result.found) == (expected is CheckStatus.OK)


def test_a_busy_default_of_a_worker_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        results = list(ports.check_ports("127.0.0.1", {"decode --port": holder.getsockname()[1]}, required="--port"))
    assert [result.status for result in results] == [CheckStatus.WARN]


def test_a_missing_model_fails_with_the_choices(capsys, tmp_path):
    assert run(["doctor", "--json", "--port", str(free_ports(1)[0]), "--model", str(tmp_path)]) == 1
    model = checks(capsys.readouterr().out)["model"]
    assert "has no config.json" in model["found"]
    assert "Give 'bundled'" in model["fix"]


def test_without_any_redis_it_says_how_to_get_one(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_server", lambda: None)
    assert run(["doctor", "--json", "--port", str(free_ports(1)[0])]) == 1
    redis = checks(capsys.readouterr().out)["redis"]
    assert redis["status"] == "fail"
    assert "apt install redis-server" in redis["fix"]


def test_a_redis_that_is_away_fails(capsys):
    assert run(["doctor", "--json", "--port", str(free_ports(1)[0]), "--redis-url", "redis://127.0.0.1:1/0"]) == 1
    assert checks(capsys.readouterr().out)["redis"]["status"] == "fail"


def test_a_check_that_fails_itself_does_not_end_the_others(capsys, monkeypatch):
    async def broken() -> ProbeAnswer:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(probes, "ask_engine", broken)
    assert run(["doctor", "--json", "--port", str(free_ports(1)[0])]) == 1
    found = checks(capsys.readouterr().out)
    assert found["check of engine"]["found"] == "ZeroDivisionError: oh"
    assert "nixl loopback" in found


async def _announce(url: str, *ids: str) -> None:
    store = await connect(url)
    for number, id in enumerate(ids, 1):
        role = WorkerRole(id.partition("-")[0])
        record = WorkerRecord(
            WorkerId(id), role, Incarnation(number), "127.0.0.1:1", "m", f"print of {role.value}", 16, 64, 32
        )
        assert await store.announce(record)
    await store.close()


def test_registered_workers_are_compared(capsys):
    with running_redis() as redis:
        asyncio.run(_announce(redis.url, "prefill-0", "decode-0"))
        assert run(["doctor", "--json", "--port", str(free_ports(1)[0]), "--redis-url", redis.url]) == 1
    found = checks(capsys.readouterr().out)
    assert found["same model"]["status"] == "ok"
    assert "print of decode on decode-0" in found["same fingerprint"]["found"]
    assert found["links of decode-0"]["status"] == "fail"
