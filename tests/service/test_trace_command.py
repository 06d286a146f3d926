"""`baton trace` against a fake router and workers with only a `RecentAttempts` call."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.gen import common_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc.server import ServerAuth, start_server
from baton.rpc.times_codec import encode_import_times, encode_prefill_times
from baton.services.cli.main import run
from baton.services.cli.settings import COMMANDS
from baton.settings.base import known_variables
from baton.store.connect import connect
from baton.telemetry.request_trace import Outcome, trace_json
from tests.redis_server import running_redis
from tests.unit.telemetry.test_request_timer import IMPORT_TIMES, PREFILL_TIMES, split_request

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def router(answers: dict[str, object], key: str | None = None) -> Iterator[str]:
    """A router that knows only these requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if key is not None and self.headers["authorization"] != f"Bearer {key}":
                status, body = 401, json.dumps({"error": "no key"})
            elif self.path in answers:
                status, body = 200, json.dumps(answers[self.path])
            else:
                status, body = 404, json.dumps({"error": "unknown"})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(WAIT_S)


class Remembers(worker_pb2_grpc.WorkerServicer):
    """A worker's ring of recent attempts."""

    def __init__(self, *attempts: worker_pb2.AttemptTimes) -> None:
        self._attempts = attempts

    async def RecentAttempts(
        self, request: worker_pb2.RecentAttemptsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.RecentAttemptsReply:
        return worker_pb2.RecentAttemptsReply(attempts=self._attempts)


@contextmanager
def workers(redis_url: str, rings: dict[WorkerRole, Remembers]) -> Iterator[None]:
    """One announced worker a role, for as long as the context lasts."""
    ready, stop = threading.Event(), threading.Event()

    async def live() -> None:
        store = await connect(redis_url)
        servers = []
        for role, ring in rings.items():

            def register(server: grpc.aio.Server, ring: Remembers = ring) -> None:
                worker_pb2_grpc.add_WorkerServicer_to_server(ring, server)

            server = await start_server("127.0.0.1", 0, register, ServerAuth(Incarnation(7)))
            servers.append(server)
            name, address = WorkerId(f"{role.value}-0"), f"127.0.0.1:{server.port}"
            assert await store.announce(WorkerRecord(name, role, Incarnation(7), address, "m", "f", 16, 512, 512))
        ready.set()
        await asyncio.to_thread(stop.wait)
        for server in servers:
            await server.stop()
        await store.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)


def recorded() -> dict[str, object]:
    trace = split_request().at(0.263).end(Outcome.FINISHED, "stop")
    return {"id": "call-1", "status": "ended", "complete": True, "trace": json.loads(trace_json(trace))}


def test_a_recorded_request_is_drawn(capsys: pytest.CaptureFixture[str]):
    with router({"/v1/requests/call-1": recorded()}) as url:
        assert run(["trace", "call-1", f"--router={url}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "call-1: finished (stop)  812 prompt 3 out  TTFT 201 ms  E2E 263 ms"
    assert any(line.startswith("~transfer") for line in lines)


def row(id: str, e2e_ms: float, code: str = "") -> dict[str, object]:
    outcome, workers = (
        ("failed" if code else "finished"),
        {"prefill": "prefill-0", "decode": "" if code else "decode-1"},
    )
    numbers = {"prompt_tokens": 812, "cached_tokens": 512, "output_tokens": 3, "attempts": 1}
    times = {"at_ms": 1_900_000_000_000, "ttft_ms": None if code else 201.4, "e2e_ms": e2e_ms}
    return {"id": id, "outcome": outcome, "code": code, "router": "r-0", **workers, **numbers, **times}


LISTED = [row("call-9", 12_345.6), row("call-10", 263.0, "worker_lost")]


@pytest.mark.parametrize(("flag", "order"), [("--last", "newest"), ("--slowest", "slowest")])
def test_requests_are_listed(flag: str, order: str, capsys: pytest.CaptureFixture[str]):
    with router({f"/v1/cluster/requests?limit=2&order={order}": {"data": LISTED}}) as url:
        assert run(["trace", flag, "2", f"--router={url}"]) == 0
        head, slow, lost = capsys.readouterr().out.splitlines()
        assert head.split() == "ENDED ID OUTCOME TTFT E2E PROMPT CACHED OUT TRIES WORKERS ROUTER".split()
        assert slow.startswith("17:46:40  call-9   finished              201 ms  12.3 s ")
        assert lost.startswith("17:46:40  call-10  failed (worker_lost)       -  263 ms ")
        assert slow.split()[7:] == ["812", "512", "3", "1", "prefill-0", ">", "decode-1", "r-0"]
        assert run(["trace", flag, "2", "--json", f"--router={url}"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(each["id"], each["e2e_ms"]) for each in rows] == [("call-9", 12_345.6), ("call-10", 263.0)]


def test_a_record_is_printed_as_json(capsys: pytest.CaptureFixture[str]):
    answer = recorded()
    with router({"/v1/requests/call-1": answer}) as url:
        assert run(["trace", "call-1", "--json", f"--router={url}"]) == 0
    assert json.loads(capsys.readouterr().out) == answer["trace"]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "one of ID, --last N and --slowest N"),
        (["call-1", "--last", "2"], "one of ID, --last N and --slowest N"),
        (["--last", "2", "--slowest", "2"], "one of ID, --last N and --slowest N"),
        (["--last", "0"], "Must be >= 1"),
        (["--slowest", "201"], "Must be <= 200"),
    ],
)
def test_a_wrong_choice_is_refused(tokens: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert run(["trace", *tokens]) == 2
    assert words in capsys.readouterr().err


def test_a_list_that_is_refused_or_empty_is_explained(capsys: pytest.CaptureFixture[str]):
    with router({"/v1/cluster/requests?limit=1&order=newest": {"data": []}}, key="k1") as url:
        assert run(["trace", "--last", "1", f"--router={url}"]) == 2
        assert "set BATON_API_KEY" in capsys.readouterr().err
        assert run(["trace", "--last", "1", f"--router={url}", "--api-key=k1"]) == 0
        assert "no request has ended" in capsys.readouterr().out


def test_the_key_is_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    with router({"/v1/requests/call-1": recorded()}, key="k1") as url:
        assert run(["trace", "call-1", f"--router={url}"]) == 2
        assert "HTTP 401" in capsys.readouterr().err
        monkeypatch.setenv("BATON_API_KEY", "k1")
        assert run(["trace", "call-1", f"--router={url}"]) == 0


def test_an_unknown_request_is_an_error(capsys: pytest.CaptureFixture[str]):
    with router({}) as url:
        assert run(["trace", "call-2", f"--router={url}"]) == 2
    assert "HTTP 404" in capsys.readouterr().err


def test_a_router_that_is_away_is_an_error(capsys: pytest.CaptureFixture[str]):
    with router({}) as url:
        pass
    assert run(["trace", "call-2", f"--router={url}"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_workers_show_a_request_that_no_router_recorded(capsys: pytest.CaptureFixture[str]):
    id = common_pb2.AttemptId(request_id="call-1", attempt=1)
    other = common_pb2.AttemptId(request_id="call-12", attempt=1)
    rings = {
        WorkerRole.PREFILL: Remembers(
            worker_pb2.AttemptTimes(id=id, prefill=encode_prefill_times(PREFILL_TIMES)),
            worker_pb2.AttemptTimes(id=other, prefill=encode_prefill_times(PREFILL_TIMES)),
        ),
        WorkerRole.DECODE: Remembers(worker_pb2.AttemptTimes(id=id, imported=encode_import_times(IMPORT_TIMES))),
    }
    with running_redis() as redis, router({}) as url, workers(redis.url, rings):
        assert run(["trace", "call-1", f"--router={url}", "--workers", f"--redis-url={redis.url}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "call-1: no router has a record; the workers measured:",
        "attempt 1: prefill-0 > decode-0",
        "  prefill   queue 40 ms, 812 tokens in 2 chunks, 100 ms of steps, sealed at 180 ms",
        "  transfer  31.5 MB in 51 pages, tcp v3, 9.0 ms exposed, committed at 210 ms",
    ]
