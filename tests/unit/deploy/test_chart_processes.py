"""Processes that the chart starts: their settings exist, their probes are answered, their drain has time."""

import os
import re
import subprocess
import urllib.request

import pytest

from baton.services.cli.main import build_app
from baton.services.cli.settings import COMMANDS, SERVICES
from baton.services.router.edge.auth_middleware import PUBLIC_PATHS
from baton.services.router.openapi import openapi_document
from baton.settings.base import known_variables, refuse_unknown_variables
from baton.settings.groups import ServiceSettings, WorkerProcessSettings, WorkerSettings
from baton.telemetry.metrics_server import start_metrics_server
from tests.unit.deploy.chart import EXAMPLES, IMAGES, component, container, environment, pod, render, services, workers

MANY_NODES = "values-many-nodes.yaml"
EXIT_S = 10
"""Time of a worker between the end of its drain and its exit, with some to spare."""

each_example = pytest.mark.parametrize("values", EXAMPLES)
WORKERS = [(values, worker) for values in EXAMPLES for worker in workers(values)]
PROCESSES = [*WORKERS, *((values, "router") for values in EXAMPLES)]
each_process = pytest.mark.parametrize(("values", "service"), PROCESSES)
each_worker = pytest.mark.parametrize("service", workers(IMAGES))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)


def expanded(workload) -> dict[str, str]:
    """The environment as Kubernetes gives it to the process; references to fields and Secrets have sample values."""
    samples = {"POD_NAME": "baton-decode-3", "POD_IP": "10.1.2.3", "REDIS_PASSWORD": "s3cret"}
    samples["BATON_REDIS_URL"] = "rediss://:s3cret@redis.example:6379/0"
    found: dict[str, str] = {}
    for name, value in environment(workload).items():
        text = samples[name] if value.startswith("<") else value
        assert set(re.findall(r"\$\((\w+)\)", text)) <= found.keys(), "a variable is expanded from earlier ones only"
        found[name] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], text)
    return found


def load(workload, monkeypatch) -> ServiceSettings:
    for name, value in expanded(workload).items():
        monkeypatch.setenv(name, value)
    settings = SERVICES[component(workload)]()
    assert isinstance(settings, ServiceSettings)
    return settings


@each_process
def test_every_variable_is_a_setting_and_has_a_value_it_takes(values, service, monkeypatch):
    workload = services(render(values))[service]
    refuse_unknown_variables(COMMANDS.values(), expanded(workload))
    settings = load(workload, monkeypatch)
    assert container(workload)["args"] == ["serve", service]
    build_app().parse_args(container(workload)["args"], exit_on_error=False, print_error=False)
    assert settings.host == "0.0.0.0"
    assert settings.cluster_secret_file is not None


@each_process
def test_no_variable_of_a_service_can_be_taken_for_a_setting(values, service):
    """Kubernetes would set BATON_PORT=tcp://... for a Service named baton, and the process would refuse it."""
    assert pod(services(render(values))[service])["enableServiceLinks"] is False


@each_process
def test_the_grace_period_outlasts_pre_stop_and_drain(values, service, monkeypatch):
    workload = services(render(values))[service]
    settings = load(workload, monkeypatch)
    command = container(workload)["lifecycle"]["preStop"]["exec"]["command"]
    waits = float(command[1]) if service == "router" else 0.0
    grace = pod(workload)["terminationGracePeriodSeconds"]
    assert grace >= waits + settings.drain_timeout_s + EXIT_S
    if service != "router":
        (wait,) = re.findall(r"--wait-s (\d+)", command[-1])
        assert settings.drain_timeout_s < float(wait) < grace


@each_worker
def test_a_worker_drains_itself_before_it_is_stopped(service):
    workload = services(render(IMAGES))[service]
    shell, flag, script = container(workload)["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("sh", "-c")
    shown = subprocess.run(
        ["sh", "-c", script.replace("exec baton", "echo", 1)],
        env={**os.environ, "BATON_WORKER_ID": "baton-decode-3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    words = shown.stdout.split()
    assert words[:2] == ["drain", "baton-decode-3"]
    build_app().parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize(("values", "service"), WORKERS)
def test_a_worker_is_named_and_addressed_as_its_pod(values, service, monkeypatch):
    settings = load(services(render(values))[service], monkeypatch)
    assert isinstance(settings, WorkerProcessSettings)
    assert settings.worker_id == "baton-decode-3"
    host, _, port = settings.advertised(1).rpartition(":")
    assert port == str(settings.port)
    # A certificate can name all pods of a Service, but not their addresses.
    names = {True: f"baton-decode-3.baton-{service}.serving.svc.cluster.local", False: "10.1.2.3"}
    assert host == names[settings.tls_cert_file is not None]


def test_each_router_has_an_id_of_its_own(monkeypatch):
    load(services(render())["router"], monkeypatch)
    assert os.environ["BATON_ROUTER_ID"] == "baton-decode-3"


@each_example
def test_settings_that_must_agree_are_the_same_on_all_workers(values, monkeypatch):
    prefill, decode = (load(services(render(values))[name], monkeypatch) for name in ("prefill", "decode"))
    names = ("model", "dtype", "kv_dtype", "page_size", "kv_head_groups", "export_lease_s", "quantization", "page_tags")
    for name in names:
        assert getattr(prefill, name) == getattr(decode, name)
    if "encode" in (found := services(render(values))):
        encode = load(found["encode"], monkeypatch)
        assert all(getattr(encode, name) == getattr(prefill, name) for name in ("model", "dtype", "device"))


def test_the_narrower_settings_win(monkeypatch):
    arguments = ("--set", "settings.log_level=debug,workerSettings.threads=2,decode.settings.threads=3")
    found = services(render("values.yaml", *arguments))
    threads = [load(found[name], monkeypatch).threads for name in ("prefill", "decode")]  # type: ignore[attr-defined]
    assert threads == [2, 3]
    assert "BATON_THREADS" not in environment(found["router"])
    assert {environment(each)["BATON_LOG_LEVEL"] for each in found.values()} == {"debug"}


def ports(workload) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


@each_example
def test_ports_are_those_that_processes_listen_on(values, monkeypatch):
    for name, workload in services(render(values)).items():
        settings = load(workload, monkeypatch)
        if isinstance(settings, WorkerProcessSettings):
            own = {}
            if isinstance(settings, WorkerSettings):
                own = {"pages": settings.page_port, "sessions": settings.session_port}
            assert ports(workload) == {"grpc": settings.port, "metrics": settings.metrics_port} | own, name
            assert len(set(ports(workload).values())) == len(ports(workload)), "0 would be no port of the chart"
        else:
            assert ports(workload) == {"http": settings.port, "metrics": settings.metrics_port}  # type: ignore[attr-defined]


def probes(workload) -> list[dict]:
    return [container(workload)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]


def test_every_probe_of_the_router_is_a_route_that_needs_no_key():
    workload = services(render(MANY_NODES))["router"]
    paths = {probe["httpGet"]["path"] for probe in probes(workload)}
    assert paths == {"/health", "/ready"}
    assert paths <= PUBLIC_PATHS
    described = openapi_document(("m",), 10, requires_api_key=True)["paths"]
    assert paths <= described.keys(), "tests/unit/router compares these with the routes"
    assert {probe["httpGet"]["port"] for probe in probes(workload)} <= ports(workload).keys()
    assert container(workload)["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container(workload)["livenessProbe"]["httpGet"]["path"] == "/health"


@each_worker
def test_every_probe_of_a_worker_is_answered(service):
    workload = services(render(IMAGES))[service]
    requests = [probe["httpGet"] for probe in probes(workload) if "httpGet" in probe]
    assert {request["port"] for request in requests} == {"metrics"}
    assert container(workload)["readinessProbe"]["grpc"] == {"port": ports(workload)["grpc"]}
    server = start_metrics_server("127.0.0.1", 0)
    try:
        for request in requests:
            url = f"http://127.0.0.1:{server.port}{request['path']}"
            with urllib.request.urlopen(url, timeout=5) as reply:
                assert reply.status == 200
    finally:
        server.close()


def test_a_worker_with_certificates_has_no_grpc_probe():
    workload = services(render("values.yaml", "--set", "tls.existingSecret=certificates"))["decode"]
    assert container(workload)["readinessProbe"]["tcpSocket"] == {"port": "grpc"}


def test_a_worker_has_the_time_to_load_its_model():
    workload = services(render(MANY_NODES))["decode"]
    probe = container(workload)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600
