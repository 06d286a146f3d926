"""The Dockerfile installs the locks, keeps torch out of the router, and copies a minimal context."""

import re

import pytest

from tests.unit.docker.stack import COMPOSE, DOCKER, GPU, ROOT, environment

DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
STAGE = re.compile(r"^FROM (\S+) AS (\S+)$", re.MULTILINE)


def stages() -> dict[str, str]:
    """stage -> its instructions."""
    starts = [*STAGE.finditer(DOCKERFILE)]
    ends = [*(match.start() for match in starts[1:]), len(DOCKERFILE)]
    return {match[2]: DOCKERFILE[match.start() : end] for match, end in zip(starts, ends, strict=True)}


def origins(stage: str) -> set[str]:
    """The stages below `stage`, itself included, without those that are only mounted."""
    text = stages()[stage]
    parents = {text.split()[1], *re.findall(r"^COPY --from=(\S+)", text, re.MULTILINE)} & stages().keys()
    return {stage}.union(*(origins(parent) for parent in parents))


def test_no_part_of_the_router_image_installs_torch():
    assert "torch" in "".join(stages()[stage].lower() for stage in origins("worker"))
    assert "torch" not in "".join(stages()[stage].lower() for stage in origins("router"))
    names = re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements" / "router.txt").read_text(), re.MULTILINE)
    assert "starlette" in names
    assert {"torch", "transformers", "nixl-cu12"}.isdisjoint(names)


@pytest.mark.parametrize("lock", ["build", "router", "${WORKER_LOCK}"])
def test_locked_packages_are_installed_exactly(lock):
    lines = [line.strip() for line in DOCKERFILE.splitlines() if f"-r /src/requirements/{lock}.txt" in line]
    assert lines == [f"pip install --no-deps --require-hashes -r /src/requirements/{lock}.txt"]


@pytest.mark.parametrize("target", ["router", "worker"])
def test_the_image_does_not_run_as_root(target):
    users = [line for stage in origins(target) for line in stages()[stage].splitlines() if line.startswith("USER")]
    assert users == ["USER baton"]
    assert stages()[target].startswith("FROM runtime AS")


def test_the_gpu_overlay_installs_the_extra_gpu_and_nothing_unlocked():
    assert "ARG WORKER_LOCK=worker\n" in DOCKERFILE
    for worker in ("prefill", "decode"):
        assert GPU["services"][worker]["build"]["args"] == {"TORCH_INDEX_URL": "", "WORKER_LOCK": "gpu"}
    assert all((ROOT / "requirements" / f"{lock}.txt").exists() for lock in ("worker", "gpu"))
    unlocked = [line.strip() for line in DOCKERFILE.splitlines() if "pip install" in line and "--no-deps" not in line]
    assert unlocked == ['&& pip install "${TORCH}"']


def test_no_remote_frontend_is_used_to_build():
    assert "syntax=" not in DOCKERFILE


def test_compose_builds_stages_that_exist():
    builds = {name: service["build"] for name, service in COMPOSE["services"].items() if "build" in service}
    assert {name: build["target"] for name, build in builds.items()} == {
        "router": "router",
        "prefill": "worker",
        "decode": "worker",
        "encode": "worker",
    }
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for build in builds.values():
        assert build["target"] in stages()
        assert build["args"].keys() <= arguments
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"


@pytest.mark.parametrize(("target", "services"), [("worker", ("prefill", "decode", "encode")), ("router", ("router",))])
def test_an_image_names_the_ports_of_its_services(target, services):
    (line,) = re.findall(r"^EXPOSE (.+)$", stages()[target], re.MULTILINE)
    ports = [environment(name)[port] for name in services for port in ("BATON_PORT", "BATON_METRICS_PORT")]
    assert line.split() == ports


def test_torch_is_in_the_range_that_the_project_declares():
    assert "ARG TORCH=torch==2.13.0\n" in DOCKERFILE
    assert '"torch>=2.6,<2.14"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_everything_copied_reaches_the_builder_and_nothing_else():
    sources = {
        source.split("/")[0]
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert IGNORED[1] == "*"
    assert {line.removeprefix("!") for line in IGNORED if line.startswith("!")} == sources
    assert all((ROOT / source).exists() for source in sources)
