"""compose.yaml agrees with the services' settings, the Dockerfile and Prometheus' targets."""

import ast
import re

import pytest

from baton.settings.base import known_variables, refuse_unknown_variables
from baton.settings.groups import ANY_ADDRESS, ServiceSettings, WorkerSettings
from services.cli.settings import COMMANDS, SERVICES
from tests.unit.docker.stack import COMPOSE, DOCKER, PROMETHEUS, SECRET, SHARED, environment, seconds

WORKERS = ("prefill", "decode")


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
    assert COMPOSE["services"][service]["command"] == ["serve", service]
    assert settings.drain_timeout_s + 10 < seconds(COMPOSE["services"][service]["stop_grace_period"])
    assert COMPOSE["services"][service]["restart"] == "unless-stopped"


@pytest.mark.parametrize(("settings", "service"), [(name, name) for name in WORKERS], indirect=["settings"])
def test_replicas_of_a_worker_take_name_and_address_from_their_container(settings, service):
    assert isinstance(settings, WorkerSettings)
    assert settings.worker_id is None, "`--scale` would give replicas one id"
    assert settings.advertise_address is None, "`--scale` would give replicas one address"
    assert settings.host in ANY_ADDRESS
    assert settings.threads == 1


@pytest.mark.parametrize(("settings", "service"), [(name, name) for name in SERVICES], indirect=["settings"])
def test_health_checks_use_the_services_port(settings, service):
    kind, command, flag, program = COMPOSE["services"][service]["healthcheck"]["test"]
    ast.parse(program)
    is_worker = isinstance(settings, WorkerSettings)
    port, path = (settings.metrics_port, "metrics") if is_worker else (int(environment(service)["BATON_PORT"]), "ready")
    assert (kind, command, flag) == ("CMD", "python", "-c")
    assert f"'http://127.0.0.1:{port}/{path}'" in program


@pytest.mark.parametrize("settings", WORKERS, indirect=True)
def test_prometheus_scrapes_every_replica_of_a_worker(settings):
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    [service] = [name for name in WORKERS if SERVICES[name] is type(settings)]
    [found] = jobs[service]["dns_sd_configs"]
    assert (found["names"], found["type"], found["port"]) == ([service], "A", settings.metrics_port)
    assert jobs.keys() == set(SERVICES)


def test_the_router_stops_before_its_workers():
    needs = {name: set(service.get("depends_on", ())) for name, service in COMPOSE["services"].items()}
    assert needs["router"] == {"redis", "decode"}
    assert needs["decode"] == {"redis", "prefill"}
    for service in COMPOSE["services"].values():
        assert all(wait["condition"] == "service_healthy" for wait in service.get("depends_on", {}).values())


def test_ports_without_authentication_bind_to_loopback():
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_mounted_file_exists():
    mounts = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", [])]
    folders = [DOCKER / mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    volumes = {mount.split(":")[0] for mount in mounts if not mount.startswith("./")}
    assert len(folders) == 3
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
