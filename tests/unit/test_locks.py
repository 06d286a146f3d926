"""The locks of requirements/: which extras each holds, and that nothing but `gpu.txt` brings CUDA."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CUDA = re.compile(r"^(nvidia-|cuda-|flashinfer|nccl|nixl-cu13|triton|torch$)")


def locked(name: str) -> dict[str, set[str]]:
    """package -> its versions; markers may choose between several."""
    versions: dict[str, set[str]] = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([a-z0-9-]+)==(\S+)", line):
            versions.setdefault(found[1], set()).add(found[2])
    return versions


def compiled(lock: str) -> list[str]:
    """The extras that `make lock` names for a lock."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = (line for line in text.splitlines() if line.endswith(f"-o requirements/{lock}.txt"))
    assert "--all-extras" not in command, "the extra gpu would bring CUDA to every machine"
    return re.findall(r"--extra (\w+)", command)


def test_the_extra_gpu_is_pinned():
    assert EXTRAS["gpu"]
    for requirement in EXTRAS["gpu"]:
        assert re.match(r"[\w-]+(\[\w+\])?==\d[\w.]*; sys_platform == 'linux'$", requirement), requirement


@pytest.mark.parametrize("lock", ["dev", "worker", "router", "build", "proto", "schema-suite"])
def test_no_other_lock_brings_cuda(lock):
    assert "gpu" not in (compiled(lock) if lock not in {"build", "proto", "schema-suite"} else ())
    assert [name for name in locked(lock) if CUDA.match(name)] == []


def test_the_lock_for_developing_has_every_extra_but_gpu():
    assert set(compiled("dev")) == EXTRAS.keys() - {"gpu"}


def test_the_lock_for_gpus_has_the_pins_of_the_extra_and_nixl_once():
    assert {"worker", "embedded", "gpu"} == set(compiled("gpu"))
    packages = locked("gpu")
    for requirement in EXTRAS["gpu"]:
        name, version = re.match(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", requirement).groups()  # type: ignore[union-attr]
        assert packages[name] == {version}
    assert [name for name in packages if name.startswith("nixl")] == ["nixl-cu13"]
    assert "torch" not in packages, "the machine chooses its build"


def test_what_two_locks_hold_has_one_version():
    everything = locked("dev")
    for lock in ("worker", "router", "gpu", "schema-suite"):
        for name, versions in locked(lock).items():
            assert versions <= everything.get(name, versions), f"{lock}: {name}"


def test_the_gpu_packages_are_for_the_cuda_of_torchs_default_build():
    """torch 2.13's build of the default index is for CUDA 13, and allows cuda-bindings of 13 only."""
    packages = locked("gpu")
    assert all(version.startswith("13.") for version in packages["cuda-bindings"])
    assert "flashinfer-python[cu13]" in " ".join(EXTRAS["gpu"])


def test_the_router_can_export_spans():
    assert compiled("router") == ["otel"]
    assert "opentelemetry-exporter-otlp-proto-http" in locked("router")
