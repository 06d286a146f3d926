"""`baton serve` accepts the command lines that `baton up` makes."""

import errno
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.services.cli import serve
from baton.services.cli.forwarded_flags import DECIDED, SERVICES
from baton.services.cli.main import build_app, run
from baton.services.cli.plan import SharedFlags, callable_host, make_plan, plan_cores, share_cores
from baton.services.cli.settings import UpSettings
from baton.services.decode.settings import DecodeSettings
from baton.settings.groups import ServiceSettings

SHARED = SharedFlags("unix:///tmp/s", Path("/tmp/s.secret"))


@pytest.fixture
def served(monkeypatch):
    """The services that `baton serve` would run."""
    runs: dict[int, tuple[str, ServiceSettings]] = {}

    def note(name, settings) -> int:
        runs[settings.port] = (name, settings)
        return 0

    monkeypatch.setattr(serve, "run_service", note)
    return runs


def test_every_command_is_accepted_by_serve_with_its_settings(served):
    settings = UpSettings(prefill=2, decode=1, port=0, page_size=32, dtype="float32", transport="stream", model="m")
    plan = make_plan(settings, SHARED, cores=[0, 1])
    assert [command.name for command in plan.commands] == ["prefill-0", "prefill-1", "decode-0", "router"]
    for command in plan.commands:
        assert command.arguments[:3] == (sys.executable, "-m", "baton.services.cli.main")
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
    assert plan.router_metrics == f"http://127.0.0.1:{router.metrics_port}/metrics"
    assert {settings.redis_url for _, settings in served.values()} == {"unix:///tmp/s"}
    assert {settings.cluster_secret_file for _, settings in served.values()} == {SHARED.secret_file}
    assert {settings.model for _, settings in served.values()} == {"m"}


def services_of(served, *flags: str) -> dict[str, Any]:
    """The settings of the services that `baton up` with these flags starts, by role."""
    settings = build_app().parse_args(["up", *flags], exit_on_error=False, print_error=False)[1].kwargs["settings"]
    for command in make_plan(settings, SHARED, cores=[0, 1]).commands:
        assert run(command.arguments[3:]) == 0
    return dict(served.values())


def test_every_flag_of_a_service_is_a_flag_of_up_but_those_it_decides():
    known = set(UpSettings.model_fields)
    for name, model in SERVICES.items():
        assert set(model.model_fields) - known - DECIDED == set(), name


def test_flags_reach_the_services_that_know_them(served, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    found = services_of(
        served,
        *("--quantization", "int8", "--device", "cpu", "--max-model-len", "512", "--served-model-name", "a,b"),
        *("--chat-template", str(template), "--no-digests", "--page-checks", "off", "--max-rows", "3"),
        *("--token-budget", "64", "--no-ui", "--port", "0"),
    )
    for role in ("prefill", "decode"):
        worker = found[role]
        assert (worker.quantization, worker.device, worker.max_model_len, worker.digests) == ("int8", "cpu", 512, False)
    assert {settings.chat_template for settings in found.values()} == {template}
    assert (found["router"].served_model_name, found["router"].ui) == ("a,b", False)
    assert (found["prefill"].token_budget, found["decode"].token_budget, found["decode"].max_rows) == (64, 0, 3)


def test_flags_that_are_not_given_leave_the_services_defaults(served):
    found = services_of(served, "--port", "0")
    assert found["decode"].max_rows == DecodeSettings.model_fields["max_rows"].default
    assert found["prefill"].digests is True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--quantization", "int8", "--decoder", "stock"], "needs the lean decoder"),
        (["--chat-template", "/no/such.jinja"], "--chat-template '/no/such.jinja': there is no such file"),
        (["--token-budget", "4"], "token_budget must be at least page_size"),
        (["--max-rows", "0"], "--max-rows '0'"),
        (["--quantization", "int3"], "int8"),
    ],
)
def test_flags_that_a_service_refuses_are_refused_before_a_start(flags, words, capsys):
    assert run(["up", "--port", "0", *flags]) == 2
    assert words in capsys.readouterr().err


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


def test_encode_workers_are_started_and_waited_for_like_others(served):
    plan = make_plan(UpSettings(encode=2, port=0), SHARED, cores=[0, 1])
    assert [command.name for command in plan.commands] == ["prefill-0", "decode-0", "encode-0", "encode-1", "router"]
    for command in plan.commands:
        assert run(command.arguments[3:]) == 0
    ports = {settings.metrics_port: name for name, settings in served.values() if name != "router"}
    assert {url.rsplit(":", 1)[1]: name.split("-")[0] for url, name in plan.worker_metrics.items()} == {
        f"{port}/metrics": name for port, name in ports.items()
    }
    assert [*plan.worker_metrics.values()] == ["prefill-0", "decode-0", "encode-0", "encode-1"]


def test_a_busy_port_is_found_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match=f"HTTP port {port} .* --port {port + 1}") as caught:
            make_plan(UpSettings(port=port), SHARED, cores=[0])
        assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize(
    ("cores", "workers", "threads", "shares"),
    [
        ([0, 1], 2, 1, [(0,), (1,)]),
        ([4], 2, 1, [(4,), (4,)]),
        ([0, 1, 2, 3], 2, 2, [(0, 1), (2, 3)]),
        ([0, 1], 2, 3, [(0, 1), (0, 1)]),
    ],
)
def test_cores_are_shared_only_when_there_are_too_few(cores, workers, threads, shares):
    assert share_cores(cores, workers, threads) == shares


@pytest.mark.parametrize(
    ("cores", "flags", "threads"),
    [(2, {}, 1), (4, {}, 1), (5, {}, 2), (64, {}, 4), (64, {"decode": 7}, 4), (8, {"threads": 5}, 5), (1, {}, 1)],
)
def test_threads_follow_the_cores_unless_they_are_given(served, cores, flags, threads):
    plan = make_plan(UpSettings(port=0, **flags), SHARED, cores=range(cores))
    for command in plan.commands:
        assert run(command.arguments[3:]) == 0
    assert {settings.threads for name, settings in served.values() if name != "router"} == {threads}


def test_workers_lend_each_other_the_cores_that_they_do_not_share():
    plan = plan_cores(UpSettings(prefill=2, decode=1), cores=[4, 5])
    assert plan is not None
    assert dict(plan.cores) == {"prefill-0": (4,), "prefill-1": (5,), "decode-0": (4,)}
    assert plan.borrowable("prefill-0") == {5: 0b010}
    assert plan.borrowable("prefill-1") == {4: 0b101}


@pytest.mark.parametrize(
    ("flags", "cores"),
    [
        ({"lend_cores": False}, 2),
        ({"prefill": 0, "decode": 1, "decode_token_budget": 64}, 2),
        ({}, 1),
        ({"decode": 64}, 99),
    ],
)
def test_nothing_is_lent_if_switched_off_or_without_others(flags, cores):
    assert plan_cores(UpSettings(**flags), range(cores)) is None


def test_the_file_of_the_lease_reaches_the_workers_and_no_router(served):
    shared = SharedFlags("unix:///tmp/s", SHARED.secret_file, core_lease_file=Path("/tmp/cores"))
    for command in make_plan(UpSettings(port=0), shared, cores=[0, 1]).commands:
        assert run(command.arguments[3:]) == 0
    found = dict(served.values())
    assert found["prefill"].core_lease_file == found["decode"].core_lease_file == Path("/tmp/cores")
    assert "core_lease_file" not in type(found["router"]).model_fields


def test_a_wildcard_interface_is_reached_by_loopback():
    assert callable_host("0.0.0.0") == "127.0.0.1"
    assert callable_host("10.0.0.7") == "10.0.0.7"
