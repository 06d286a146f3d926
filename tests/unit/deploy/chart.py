"""The chart of deploy/helm, rendered by a real helm, and its objects, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "baton"
SCHEMAS = Path(sys.executable).parent.parent / "share" / "chart-schemas"
IMAGES = "values-images.yaml"
"""The example with encode workers, which are off by default."""
EXAMPLES = ("values.yaml", "values-cpu.yaml", "values-one-gpu-node.yaml", "values-many-nodes.yaml", IMAGES)
NAMESPACE = "serving"
RELEASE = "baton"

Object = dict[str, Any]


def missing(what: str) -> NoReturn:
    """Skips a test for want of a tool; in CI, where `make helm` has run, fails it."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {what}: `make helm` fetches it")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs helm with the chart's folder as working directory."""
    beside_python = str(Path(sys.executable).parent)
    program = shutil.which("helm", path=beside_python) or shutil.which("helm") or missing("helm")
    return subprocess.run([program, *arguments], cwd=CHART, capture_output=True, text=True, timeout=60, check=False)


def template(*arguments: str, values: str = "values.yaml", release: str = RELEASE) -> subprocess.CompletedProcess[str]:
    """`helm template`, which needs no cluster."""
    return helm("template", release, ".", "--namespace", NAMESPACE, "--values", values, *arguments)


@cache
def render(values: str = "values.yaml", *arguments: str) -> tuple[Object, ...]:
    """Every object of the chart for one file of values and further arguments."""
    done = template(*arguments, values=values)
    assert done.returncode == 0, done.stderr
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def named(objects: tuple[Object, ...], kind: str) -> dict[str, Object]:
    """name -> object, of a kind."""
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


def workloads(objects: tuple[Object, ...]) -> Iterator[Object]:
    """Deployments and StatefulSets."""
    return (found for found in objects if found["kind"] in {"Deployment", "StatefulSet"})


def component(found: Object) -> str:
    """router, prefill, decode, encode or redis."""
    return str(found["metadata"]["labels"]["app.kubernetes.io/component"])


def pod(workload: Object) -> Object:
    """The pod specification."""
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Object) -> Object:
    """The only container of a pod."""
    (only,) = pod(workload)["containers"]
    return dict(only)


def services(objects: tuple[Object, ...]) -> dict[str, Object]:
    """router, prefill, decode, perhaps encode -> workload: those that run our code."""
    found = {component(each): each for each in workloads(objects)}
    found.pop("redis", None)
    assert found.keys() - {"encode"} == {"router", "prefill", "decode"}
    return found


def workers(values: str) -> tuple[str, ...]:
    """Kinds of workers of an example."""
    return ("prefill", "decode", "encode") if values == IMAGES else ("prefill", "decode")


def environment(workload: Object) -> dict[str, str]:
    """The variables of a container with a value; one from a pod's field or a Secret has its reference as text."""
    return {each["name"]: each.get("value", f"<{each.get('valueFrom')}>") for each in container(workload)["env"]}


def selects(selector: Object, labels: Object) -> bool:
    """Compares the equality selector of an object with labels."""
    return bool(selector) and selector.items() <= labels.items()
