"""The steps of the compose test: their order, what a failure does, and that each breaks what it says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from http.server import ThreadingHTTPServer
from subprocess import CompletedProcess
from threading import Thread

import httpx2
import pytest

from baton.telemetry.spans import SpanSink, otlp_exporter
from tests.compose import receiver
from tests.compose.__main__ import main, run_steps
from tests.compose.alerts import Alerts
from tests.compose.engine import ComposeProject, DockerFailed
from tests.compose.load import ExactLoad
from tests.compose.steps import SPANS, STEPS, ComposeTest, linked_pairs
from tests.unit.compose.test_engine import Docker
from tests.unit.telemetry.test_spans import finished


class FakeLoad(ExactLoad):
    """Ends at once; says when it was waited for."""

    def wait_for_calls(self, timeout_s: float, each: int = 2) -> None:
        self.events.append(["calls"])
        self.num_right += 1

    events: list[list[str]]


class FakeAlerts(Alerts):
    """Says which alert was waited for, and when silence was."""

    def __init__(self, events: list[list[str]]) -> None:
        super().__init__()
        self.events = events

    def wait_for(self, name: str) -> None:
        self.events.append([name])

    def stay_silent(self) -> None:
        self.events.append(["silence"])


class FakeTest(ComposeTest):
    """A cluster whose docker only remembers, and whose load and links are always there."""

    def __init__(self, docker: Docker, *problems: str) -> None:
        alerts = FakeAlerts(docker.commands)
        super().__init__(ComposeProject("mine", {}, docker), "http://nowhere", "http://nowhere", [], alerts=alerts)
        self.events = docker.commands
        self.problems = list(problems)
        self.names: tuple[str, ...] = ("1", "2", "3")
        self.num_refused = self.num_resumes = 0

    def load(self) -> AbstractContextManager[ExactLoad]:  # type: ignore[override]
        load = FakeLoad("", [], problems=self.problems, num_refused=self.num_refused, num_resumes=self.num_resumes)
        load.events = self.events
        return nullcontext(load)

    def worker_ids(self, role: str) -> list[str]:
        return [f"{role}-{name}" for name in self.names]

    def wait_router(self, container: str) -> None:
        self.events.append([f"the proxy asks {container}"])

    def wait_pairs(self, wanted: int | None = None) -> None:
        self.events.append(["pairs" if wanted is None else f"{wanted} pairs"])


def did(test: FakeTest) -> list[str]:
    """What happened in order, without the questions for names."""
    words = [" ".join(event) for event in test.events]
    words = [word.removeprefix("docker ") for word in words if not word.startswith("docker ps")]
    return [re.sub(r"^compose .* up .*--scale decode=", "up ", word) for word in words]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("drain", ["up 2", "pairs", "calls", "silence"]),
        ("kill", ["kill a", "calls", "2 pairs", "BatonWorkerLost", "start a", "pairs"]),
        ("pause", ["pause b", "calls", "2 pairs", "unpause b", "pairs"]),
        (
            "disconnect",
            [
                "network disconnect mine_default a",
                "calls",
                "2 pairs",
                "network connect --alias prefill mine_default a",
                "pairs",
            ],
        ),
        (
            "restart",
            [
                *(f"restart --time 50 {name}|pairs" for _ in range(2) for name in "ab"),
                *(f"restart --time 50 {name}|the proxy asks {name}|pairs" for name in "ab"),
                "calls",
            ],
        ),
    ],
)
def test_a_fault_is_undone_only_after_calls_have_seen_it(step: str, expected: list[str]):
    test = FakeTest(Docker(ps="b\na\n"))
    STEPS[step](test)
    assert did(test) == [word for each in expected for word in each.split("|")]
    assert test.notes == ["1 calls right, 0 resumed, 0 refused"]


def test_a_lost_worker_is_one_of_all_that_were_asked_for():
    test = FakeTest(Docker(ps="a\nb\n"))
    test.project.scales["decode"] = 3
    STEPS["kill"](test)
    STEPS["disconnect"](test)
    assert [word for word in did(test) if word.endswith(" pairs")] == ["4 pairs", "3 pairs"]


class Scaling(Docker):
    """Has two containers, and three once it was told to scale."""

    def __call__(self, command: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
        scaled = any("--scale" in each for each in self.commands)
        self._answers["ps"] = "a\nb\nc\n" if scaled else "a\nb\n"
        return super().__call__(command, timeout_s)


def test_a_replica_that_is_not_named_as_its_container_fails():
    STEPS["scale"](test := FakeTest(Scaling()))
    assert did(test) == ["up 3", "pairs"]
    test = FakeTest(Scaling())
    test.names = ("1", "2", "3309af3c32c6")
    with pytest.raises(AssertionError, match="3309af3c32c6"):
        STEPS["scale"](test)


@pytest.mark.parametrize("seen", ["num_refused", "num_resumes"])
def test_a_call_that_was_refused_or_cut_fails_a_rolling_restart(seen: str):
    test = FakeTest(Docker(ps="a\nb\n"))
    setattr(test, seen, 1)
    with pytest.raises(AssertionError, match="refused or cut off"):
        STEPS["restart"](test)
    STEPS["kill"](test)


@pytest.mark.parametrize("step", ["drain", "kill", "pause", "disconnect", "restart"])
def test_a_client_that_saw_an_error_fails_the_step(step: str):
    with pytest.raises(AssertionError, match="a wrong token"):
        STEPS[step](FakeTest(Docker(ps="a\nb\n"), "a wrong token"))


def test_containers_that_may_write_or_are_root_fail():
    good = '[{"HostConfig": {"ReadonlyRootfs": true, "CapDrop": ["ALL"]}, "State": {"Health": {"Status": "healthy"}}}]'
    STEPS["contained"](FakeTest(Docker(ps="a\n", inspect=good, id="10001\n")))
    for bad, uid in (
        (good.replace("true", "false"), "10001"),
        (good.replace("healthy", "starting"), "10001"),
        (good, "0"),
    ):
        with pytest.raises(AssertionError):
            STEPS["contained"](FakeTest(Docker(ps="a\n", inspect=bad, id=uid)))


@pytest.mark.parametrize(("metrics", "passes"), [('baton_transfer_bytes_total{link="x"} 4096.0\n', True), ("", False)])
def test_bytes_are_those_of_the_decode_workers(metrics: str, passes: bool):
    test = FakeTest(Docker(ps="a\nb\n", exec=metrics))
    if passes:
        STEPS["bytes"](test)
        assert test.notes == ["8192 bytes"]
        return
    with pytest.raises(AssertionError):
        STEPS["bytes"](test)


def test_what_is_left_behind_fails():
    STEPS["down"](FakeTest(Docker()))
    with pytest.raises(AssertionError):
        STEPS["down"](FakeTest(Docker(volume="v1\n")))


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"status": "ready", "detail": "4 linked prefill/decode pairs; kernels: avx2"}, 4),
        (200, {"status": "ready", "detail": "12 linked prefill/decode pairs"}, 12),
        (200, {"status": "ready"}, -1),
        (503, {"error": {"message": "no linked prefill/decode pair"}}, -1),
    ],
)
def test_the_pairs_are_read_from_the_routers_answer(status: int, body: dict[str, object], expected: int):
    assert linked_pairs(httpx2.Response(status, json=body)) == expected


def test_the_stack_is_taken_down_after_a_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    docker = Docker(up=DockerFailed("unhealthy"))
    assert run_steps(FakeTest(docker), ["up", "exact", "down"]) == 1
    assert "up ... FAILED" in capsys.readouterr().out
    assert docker[-1].endswith("down --volumes --remove-orphans")
    assert (tmp_path / "mine.log").exists()


def test_a_failure_without_the_step_down_leaves_the_stack_for_a_look(capsys):
    docker = Docker(up=DockerFailed("unhealthy"))
    assert run_steps(FakeTest(docker), ["up"]) == 1
    assert not any("down" in command for command in docker.commands)


def test_steps_run_in_their_order_and_say_what_they_found(capsys):
    assert run_steps(FakeTest(Docker(ps="a\nb\n", exec="baton_transfer_bytes_total 1\n")), ["kill", "bytes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["bytes", "kill"]
    assert [line.rpartition("; ")[2] for line in lines] == ["2 bytes", "1 calls right, 0 resumed, 0 refused"]


def test_a_machine_without_docker_gets_one_clear_line(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith(
        "There is no program `docker` here. make test-compose needs Docker Engine"
    )


def test_a_step_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "up,dance"])
    assert "no such step: dance" in capsys.readouterr().err


def test_the_receiver_counts_what_the_routers_export():
    server = ThreadingHTTPServer(("127.0.0.1", 0), receiver.Receiver)
    thread = Thread(target=server.serve_forever)
    thread.start()
    receiver.counts.clear()
    try:
        sink = SpanSink(otlp_exporter(f"http://127.0.0.1:{server.server_port}"))
        sink(finished(), b"")
        sink.close()
        with httpx2.Client(trust_env=False, verify=False) as client:
            counts = client.get(f"http://127.0.0.1:{server.server_port}/").json()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert set(SPANS) <= counts.keys()
