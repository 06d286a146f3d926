"""The parsed files of docker/, for the tests of this folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
SERVICES = ("router", "prefill", "decode")

_VARIABLE = re.compile(r"\$\{\w+:?-([^}]*)\}")


def read_yaml(path: Path) -> Any:
    """A YAML file with merged anchors and the defaults of compose's `${NAME:-default}`."""
    return yaml.safe_load(_VARIABLE.sub(r"\1", path.read_text(encoding="utf-8")))


COMPOSE: dict[str, Any] = read_yaml(DOCKER / "compose.yaml")
SHARED: dict[str, Any] = read_yaml(DOCKER / "compose.cma.yaml")
GPU: dict[str, Any] = read_yaml(DOCKER / "compose.gpu.yaml")
SECRET: dict[str, Any] = read_yaml(DOCKER / "compose.secret.yaml")
PROMETHEUS: dict[str, Any] = read_yaml(DOCKER / "prometheus" / "prometheus.yml")


def environment(service: str) -> dict[str, str]:
    """The environment of a service in compose."""
    return {name: str(value) for name, value in COMPOSE["services"][service]["environment"].items()}


def seconds(duration: str) -> float:
    """`50s` as 50.0."""
    return float(duration.removesuffix("s"))
