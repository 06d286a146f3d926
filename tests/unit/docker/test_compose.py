"""compose.yaml agrees with the services' settings, the Dockerfile and Prometheus' targets."""

import ast
import os
import re
import socket
import subprocess

import pytest

from baton.services.cli.main import build_app
from baton.services.cli.settings import COMMANDS, SERVICES
from baton.settings.base import known_variables, refuse_unknown_variables
from baton.settings.groups import ANY_ADDRESS, ServiceSettings, WorkerProcessSettings
from tests.unit.docker.stack import COMPOSE, DOCKER, GPU, PROMETHEUS, SECRET, SHARED, environment, seconds

WORKERS = ("prefill", "decode")
ALL_WORKERS = (*WORKERS, "encode")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(monkeypatch, request) -> ServiceSettings:
    for name, value in environment(request.param).items():
        monkeypatch.setenv(name, value)
    model = SERVICES[request.param]
    loaded = model()
    assert isinstance(loaded, ServiceSettings)
    return loaded


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_given_only_variables_that_exist(service):
    refuse_unknown_variables(COMMANDS.values(), environment(service))


@pytest.mark.parametrize(("settings", "service"), [(name, name) for name in SERVICES], indirect=["settings"])
def test_the_stop_grace_period_outlasts_the_drain(settings, service):
    words = COMPOSE["services"][service]["command"]
    assert words == ["serve", service] or words[0].startswith(f"exec baton serve {service} ")
    assert settings.drain_timeout_s + 10 < seconds(COMPOSE["services"][service]["stop_grace_period"])
    assert COMPOSE["services"][service]["restart"] == "unless-stopped"


@pytest.mark.parametrize(("settings", "service"), [(name, name) for name in ALL_WORKERS], indirect=["settings"])
def test_replicas_of_a_worker_take_name_and_address_from_their_container(settings, service):
    assert isinstance(settings, WorkerProcessSettings)
    assert settings.worker_id is None, "`--scale` would give replicas one id"
    assert settings.advertise_address is None, "`--scale` would give replicas one address"
    assert settings.host in ANY_ADDRESS
    assert settings.threads == 1


@pytest.mark.parametrize(("settings", "service"), [(name, name) for name in SERVICES], indirect=["settings"])
def test_health_checks_use_the_services_port(settings, service):
    kind, command, flag, program = COMPOSE["services"][service]["healthcheck"]["test"]
    ast.parse(program)
    is_worker = isinstance(settings, WorkerProcessSettings)
    port, path = (settings.metrics_port, "metrics") if is_worker else (int(environment(service)["BATON_PORT"]), "ready")
    assert (kind, command, flag) == ("CMD", "python", "-c")
    assert f"'http://127.0.0.1:{port}/{path}'" in program


@pytest.mark.parametrize("settings", ALL_WORKERS, indirect=True)
def test_prometheus_scrapes_every_replica_of_a_worker(settings):
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    [service] = [name for name in ALL_WORKERS if SERVICES[name] is type(settings)]
    [found] = jobs[service]["dns_sd_configs"]
    assert (found["names"], found["type"], found["port"]) == ([service], "A", settings.metrics_port)
    assert jobs.keys() == set(SERVICES)


def test_prometheus_scrapes_every_router():
    (job,) = (job for job in PROMETHEUS["scrape_configs"] if job["job_name"] == "router")
    [found] = job["dns_sd_configs"]
    assert (found["names"], found["port"]) == (["router"], int(environment("router")["BATON_METRICS_PORT"]))


def test_routers_stop_before_their_workers_which_load_side_by_side():
    needs = {name: service.get("depends_on", {}) for name, service in COMPOSE["services"].items()}
    assert needs["router"].keys() == {"redis", *WORKERS}
    assert needs["proxy"] == {"router": {"condition": "service_healthy"}}
    for name in WORKERS:
        assert needs[name] == {"redis": {"condition": "service_healthy"}}
        assert needs["router"][name] == {"condition": "service_started"}


def test_two_of_each_kind_run_behind_one_port():
    numbers = {name: COMPOSE["services"][name]["scale"] for name in SERVICES}
    assert numbers == {**dict.fromkeys(SERVICES, 2), "encode": 1}
    assert COMPOSE["services"]["encode"]["profiles"] == ["images"], "most models have no images"
    assert [name for name, each in COMPOSE["services"].items() if "8000" in str(each.get("ports"))] == ["proxy"]


def test_each_router_takes_its_id_from_its_container(tmp_path):
    (script,) = COMPOSE["services"]["router"]["command"]
    assert COMPOSE["services"]["router"]["entrypoint"] == ["sh", "-c"]
    program = tmp_path / "baton"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = subprocess.run(
        ["sh", "-c", script.replace("$$", "$")], env=path, capture_output=True, text=True, check=True, timeout=10
    )
    words = shown.stdout.split()
    assert words == ["serve", "router", "--router-id", f"router-{socket.gethostname()}"]
    build_app().parse_args(words, exit_on_error=False, print_error=False)


def test_every_service_is_contained():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "mem_limit" in service, name
        assert service["restart"] == "unless-stopped", name
        assert "healthcheck" in service, name
        # Our images and HAProxy's name a user themselves.
        assert name in {*SERVICES, "proxy"} or str(service["user"]).split(":")[0] not in {"0", "root"}


def test_redis_asks_for_the_services_password_and_is_not_published():
    store = COMPOSE["services"]["redis"]
    password = store["environment"]["REDISCLI_AUTH"]
    assert "ports" not in store
    assert all(environment(name)["BATON_REDIS_URL"] == f"redis://:{password}@redis:6379/0" for name in SERVICES)
    (script,) = store["command"]
    assert "requirepass $$REDISCLI_AUTH" in script
    assert password not in script
    assert "--appendonly yes --appendfsync no" in script


def test_one_command_brings_all_but_what_few_need():
    optional = {name: each["profiles"] for name, each in COMPOSE["services"].items() if "profiles" in each}
    assert optional == {"encode": ["images"], "collector": ["tracing"]}


def test_no_account_of_grafana_can_be_logged_into():
    variables = COMPOSE["services"]["grafana"]["environment"]
    assert variables["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert variables["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not any("PASSWORD" in name for name in variables)


def test_the_proxy_checks_readiness_and_repeats_no_request():
    text = (DOCKER / "haproxy" / "haproxy.cfg").read_text(encoding="utf-8")
    lines = {line.strip() for line in text.splitlines()}
    port = environment("router")["BATON_PORT"]
    assert {
        "option http-no-delay",
        "option abortonclose",
        "retry-on conn-failure",
        "option httpchk GET /ready",
    } <= lines
    assert f"server-template router 8 router:{port} resolvers docker init-addr none" in lines
    stops = re.findall(r"hard-stop-after (\d+)s", text)
    assert float(stops[0]) < seconds(COMPOSE["services"]["proxy"]["stop_grace_period"])


def test_a_router_serves_until_the_proxy_has_noticed_that_it_stops():
    text = (DOCKER / "haproxy" / "haproxy.cfg").read_text(encoding="utf-8")
    ((interval, fall),) = re.findall(r"check inter (\d+)s fall (\d+) ", text)
    delay_s = float(environment("router")["BATON_SHUTDOWN_DELAY_S"])
    assert delay_s > int(interval) * (int(fall) + 1), "a check may have just begun"
    drain_s = float(environment("router")["BATON_DRAIN_TIMEOUT_S"])
    assert delay_s + drain_s + 10 < seconds(COMPOSE["services"]["router"]["stop_grace_period"])


def test_the_gpu_overlay_gives_each_kind_a_gpu_and_the_verbs():
    for name in WORKERS:
        service = GPU["services"][name]
        refuse_unknown_variables(COMMANDS.values(), service["environment"])
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert service["devices"] == ["/dev/infiniband:/dev/infiniband"]
        assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
        assert service["environment"]["UCX_NET_DEVICES"] == "all", "eth0 would force TCP"
        assert service["environment"]["BATON_DEVICE"] == "cuda"
        assert service["build"]["args"]["TORCH_INDEX_URL"] == ""
    gpus = [
        GPU["services"][name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name in WORKERS
    ]
    assert gpus == [["0"], ["1"]]


def test_encode_workers_of_the_gpu_overlay_are_built_and_typed_as_prefill():
    """All workers have one image, so a build for CPUs would replace theirs; and prefill takes its own dtype only."""
    encode, prefill = GPU["services"]["encode"], GPU["services"]["prefill"]
    refuse_unknown_variables(COMMANDS.values(), encode["environment"])
    assert encode["build"] == prefill["build"]
    assert COMPOSE["services"]["encode"]["image"] == COMPOSE["services"]["prefill"]["image"]
    for name in ("BATON_DTYPE", "BATON_DEVICE"):
        assert encode["environment"][name] == prefill["environment"][name]
    (device,) = encode["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "devices" not in encode, "it has no pages to move"


def test_ports_without_authentication_bind_to_loopback():
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_mounted_file_exists():
    mounts = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", [])]
    folders = [DOCKER / mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    volumes = {mount.split(":")[0] for mount in mounts if not mount.startswith("./")}
    assert len(folders) == 4
    assert all(folder.is_dir() for folder in folders)
    assert volumes == COMPOSE["volumes"].keys()


def test_workers_share_namespaces_of_a_third_container():
    for name in WORKERS:
        assert SHARED["services"][name]["pid"] == SHARED["services"][name]["ipc"] == "service:pod"
    assert SHARED["services"]["pod"]["ipc"] == "shareable"


def test_the_secret_reaches_every_service_as_a_setting_of_that_name():
    assert SECRET["services"].keys() == set(SERVICES)
    for service in SECRET["services"].values():
        refuse_unknown_variables(COMMANDS.values(), service["environment"])
        (mounted,) = service["secrets"]
        assert service["environment"] == {"BATON_CLUSTER_SECRET_FILE": f"/run/secrets/{mounted}"}
        assert mounted in SECRET["secrets"]


def test_the_secret_belongs_to_the_image_user_and_is_not_in_git():
    (user,) = re.findall(r"--uid (\d+)", (DOCKER / "Dockerfile").read_text(encoding="utf-8"))
    assert f"chown {user} docker/cluster.secret" in (DOCKER / "compose.secret.yaml").read_text(encoding="utf-8")
    assert SECRET["secrets"]["cluster"]["file"].endswith(".secret")
    assert "*.secret" in (DOCKER.parent / ".gitignore").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("service", WORKERS)
def test_nixl_is_only_used_where_containers_need_no_tcp(service):
    assert environment(service)["BATON_TRANSPORT"] == "stream"
    assert SHARED["services"][service]["environment"]["BATON_TRANSPORT"] == "auto"
