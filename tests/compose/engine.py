"""Docker's own program, asked about one compose project: containers, faults, metrics."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
FILES = (DOCKER / "compose.yaml", ROOT / "tests" / "compose" / "receiver.yaml")
COMMAND_TIMEOUT_S = 120.0
UP_TIMEOUT_S = 1800.0
LABEL = "com.docker.compose.project"
HOW_TO_GET_ONE = "make test-compose needs Docker Engine with compose v2: https://docs.docker.com/engine/install"

Program = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]
"""Runs a command with the given seconds, and returns its status and output."""


class DockerFailed(Exception):
    """A command of docker failed or took too long; the text has its command and the end of its output."""


@dataclass
class ComposeProject:
    """The stack of docker/compose.yaml under a project name of its own, so that no other one is touched."""

    name: str
    environment: Mapping[str, str]
    program: Program | None = None
    scales: dict[str, int] = field(default_factory=dict)
    """Numbers of containers that differ from the file's."""
    overlays: Sequence[str] = ()
    """Files of docker/ on top of compose.yaml."""
    profiles: Sequence[str] = ("tracing",)

    def up(self, *, build: bool = False, recreate: bool = False) -> None:
        """Starts what is missing and waits until all of it is healthy. `recreate`: replaces what differs, too."""
        scales = [word for service, number in self.scales.items() for word in ("--scale", f"{service}={number}")]
        kept = ["--remove-orphans"] if recreate else ["--no-recreate"]
        words = ["up", "--detach", "--wait", *kept, *(["--build"] if build else []), *scales]
        self.compose(*words, timeout_s=UP_TIMEOUT_S)

    def down(self) -> None:
        """Stops everything and removes containers, networks and volumes, of every profile that a step uses."""
        self.profiles = sorted({*self.profiles, "images", "grafana"})
        self.compose("down", "--volumes", "--remove-orphans", timeout_s=UP_TIMEOUT_S)

    def merged(self, *overlays: str) -> dict[str, Any]:
        """The configuration that compose makes of compose.yaml and `overlays`. Raises `DockerFailed`."""
        files = [word for name in ("compose.yaml", *overlays) for word in ("--file", str(DOCKER / name))]
        profiles = ("--profile", "images", "--profile", "tracing")
        return dict(json.loads(self.docker("compose", *files, *profiles, "config", "--format", "json")))

    def has_image(self, service: str) -> bool:
        """True if the image of a service is here or can be pulled."""
        image = self.merged()["services"][service]["image"]
        for words in (("image", "inspect", image), ("pull", "--quiet", image)):
            try:
                self.docker(*words, timeout_s=UP_TIMEOUT_S)
            except DockerFailed:
                continue
            return True
        return False

    def containers(self, service: str | None = None) -> list[str]:
        """Names of the containers that run, of one service or of all, sorted."""
        wanted = [] if service is None else ["--filter", f"label=com.docker.compose.service={service}"]
        lines = self.docker("ps", "--filter", f"label={LABEL}={self.name}", *wanted, "--format", "{{.Names}}")
        return sorted(lines.split())

    def inspect(self, container: str) -> dict[str, Any]:
        """What `docker inspect` says."""
        (found,) = json.loads(self.docker("inspect", container))
        return dict(found)

    def restart(self, container: str) -> None:
        """Stops a container gracefully, with the time that compose would give, and starts it again."""
        self.docker("restart", "--time", "50", container)

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes that still carry the project's label."""
        label = ("--filter", f"label={LABEL}={self.name}", "--quiet")
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [f"{kind[0]} {id}" for kind in kinds for id in self.docker(*kind, *label).split()]

    def metrics(self, container: str, port: int) -> str:
        """The container's `/metrics`, asked from inside: no such port is published."""
        page = f"http://127.0.0.1:{port}/metrics"
        source = f"import urllib.request as u; print(u.urlopen('{page}', timeout=5).read().decode())"
        return self.docker("exec", container, "python", "-c", source)

    def compose(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Runs `docker compose` for this project. Raises `DockerFailed`."""
        paths = (*FILES, *(DOCKER / name for name in self.overlays))
        files = [word for path in paths for word in ("--file", str(path))]
        profiles = [word for name in self.profiles for word in ("--profile", name)]
        return self.docker("compose", "--project-name", self.name, *files, *profiles, *words, timeout_s=timeout_s)

    def docker(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Runs `docker`, and returns what it printed. Raises `DockerFailed`."""
        command = ["docker", *words]
        try:
            done = (self.program or self._run)(command, timeout_s)
        except subprocess.TimeoutExpired:
            raise DockerFailed(f"{' '.join(command)}: not done within {timeout_s:g} s") from None
        if done.returncode != 0:
            raise DockerFailed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout

    def _run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def missing_docker(project: ComposeProject) -> str | None:
    """None if an engine and compose v2 answer, else what is missing and how to get it."""
    try:
        project.docker("compose", "version")
        project.docker("info", "--format", "{{.ServerVersion}}")
    except FileNotFoundError:
        return f"There is no program `docker` here. {HOW_TO_GET_ONE}"
    except DockerFailed as error:
        return f"Docker does not answer ({str(error).splitlines()[-1]}). {HOW_TO_GET_ONE}"
    return None
