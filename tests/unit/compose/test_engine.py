"""What is asked of docker, in which project, and what its failures say."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

import pytest

from tests.compose.__main__ import environment
from tests.compose.engine import ROOT, ComposeProject, DockerFailed, missing_docker
from tests.unit.docker.stack import read_yaml


class Docker:
    """A stand-in for the program: remembers commands, answers by the first word that it knows."""

    def __init__(self, **answers: str | Exception | int) -> None:
        self.commands: list[list[str]] = []
        self._answers = answers

    def __call__(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        answer = next((self._answers[word] for word in command if word in self._answers), "")
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return subprocess.CompletedProcess(command, answer, "", "first\nno route to the engine\n")
        return subprocess.CompletedProcess(command, 0, answer, "")

    def __getitem__(self, number: int) -> str:
        return " ".join(self.commands[number])


def project(docker: Docker) -> ComposeProject:
    return ComposeProject("mine", {}, docker)


@pytest.mark.parametrize(
    ("docker", "words"),
    [
        (Docker(compose=FileNotFoundError("docker")), "no program `docker`"),
        (Docker(info=1), "no route to the engine"),
        (Docker(compose=1), "compose v2"),
    ],
)
def test_without_an_engine_it_is_said_where_to_get_one(docker: Docker, words: str):
    message = missing_docker(project(docker))
    assert message is not None
    assert words in message
    assert "docs.docker.com" in message


def test_an_engine_that_answers_is_enough():
    assert missing_docker(project(Docker(info="28.0"))) is None


def test_every_command_names_the_project_and_starts_the_collector():
    docker = Docker()
    mine = project(docker)
    mine.scales["decode"] = 3
    mine.up(build=True)
    mine.down()
    for command in docker.commands:
        assert command[:4] == ["docker", "compose", "--project-name", "mine"]
        assert "tracing" in command
    assert docker[0].endswith("up --detach --wait --no-recreate --build --scale decode=3")
    assert docker[1].endswith("down --volumes --remove-orphans")


def test_a_failed_command_shows_its_end():
    with pytest.raises(DockerFailed, match=r"exit status 7\n(.|\n)*no route to the engine"):
        project(Docker(kill=7)).docker("kill", "x")


def test_a_command_that_takes_too_long_fails():
    with pytest.raises(DockerFailed, match="not done within 120 s"):
        project(Docker(kill=subprocess.TimeoutExpired("docker", 120))).docker("kill", "x")


@pytest.mark.parametrize(("kind", "expected"), [("ps", ["ps 1", "ps 2"]), ("volume", ["volume 1", "volume 2"])])
def test_whatever_carries_the_projects_label_is_left_over(kind: str, expected: list[str]):
    docker = Docker(**{kind: "1\n2\n"})
    assert project(docker).leftovers() == expected
    assert all("label=com.docker.compose.project=mine" in command for command in docker.commands)


def test_a_restart_gives_the_time_to_drain():
    docker = Docker()
    project(docker).restart("decode-1")
    grace_s = read_yaml(ROOT / "docker" / "compose.yaml")["services"]["decode"]["stop_grace_period"]
    assert docker[0] == f"docker restart --time {grace_s.removesuffix('s')} decode-1"


def test_the_variables_are_those_of_compose():
    text = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    for name in environment(1, 2, 3, 4):
        assert f"${{{name}:-" in text, name


def test_the_receiver_takes_the_collectors_place():
    receiver = read_yaml(ROOT / "tests" / "compose" / "receiver.yaml")
    stack = read_yaml(ROOT / "docker" / "compose.yaml")["services"]
    (name,) = receiver["services"].keys() - {"grafana"}
    assert receiver["services"]["grafana"] == {"profiles": ["grafana"]}, "its image may be out of reach"
    assert name in stack
    source, target, _ = receiver["services"][name]["volumes"][0].split(":")
    assert (ROOT / "docker" / source).resolve() == ROOT / "tests" / "compose" / "receiver.py"
    assert receiver["services"][name]["entrypoint"] == ["python", target]
    assert receiver["services"][name]["image"] == stack["router"]["image"]


def test_no_metrics_port_is_published_so_they_are_read_inside():
    docker = Docker(exec="baton_x 1\n")
    read: Callable[[str, int], str] = project(docker).metrics
    assert read("decode-1", 9102) == "baton_x 1\n"
    assert docker.commands[0][:4] == ["docker", "exec", "decode-1", "python"]
