"""`scripts/install.sh` with a stand-in for Python that records what it is asked: choices, quiet output, failures."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://torch.invalid/cpu"
PYTHON = """\
#!/usr/bin/env bash
case "$*" in
    "-c import ensurepip"*) exit "${TOO_OLD:-0}" ;;
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "--version") echo "Python 3.13.0" ;;
    "-m pip install"*)
        echo "${*#-m pip install }" >>calls
        echo "noise of pip"
        [ -z "${PIP_FAILS:-}" ] || [[ "$*" != *"$PIP_FAILS"* ]] || exit 1 ;;
    "-m scripts.build_kernels") echo "WARNING: the avx2 kernels are missing" ;;
    *find_server*) exit "${NO_REDIS:-0}" ;;
    *HOW_TO_GET_ONE*) echo "No redis-server is here" ;;
esac
"""

pytestmark = pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a GPU")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install.sh", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/worker.txt", "requirements/build.txt", "pyproject.toml", "hatch_build.py"):
        (tmp_path / name).write_text("")
    program(tmp_path / "bin" / "python", PYTHON)
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def install(tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{tree / 'bin'}:{os.environ['PATH']}",
        "PYTHON": str(tree / "bin" / "python"),
        "TORCH_INDEX_URL": CPU_INDEX,
        **variables,
    }
    command = ["bash", str(tree / "scripts" / "install.sh"), "run"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def calls(tree: Path) -> list[str]:
    return (tree / "calls").read_text().splitlines()


def test_without_a_gpu_torch_comes_from_its_cpu_index(tree):
    done = install(tree)
    assert done.returncode == 0, done.stderr
    torch, *others = calls(tree)
    assert f"--index-url {CPU_INDEX} torch==2.13.0" in torch
    assert not any(CPU_INDEX in other for other in others)
    assert all("--require-hashes" in other for other in others[:2])


def test_the_default_index_is_the_fallback_and_is_said(tree):
    done = install(tree, PIP_FAILS=CPU_INDEX)
    assert done.returncode == 0, done.stderr
    first, second, *_ = calls(tree)
    assert CPU_INDEX in first
    assert CPU_INDEX not in second
    assert second.endswith("torch==2.13.0")
    assert "may bring a build with CUDA" in done.stdout


@pytest.mark.parametrize("how", ["a GPU", "no index"])
def test_with_a_gpu_or_without_an_index_the_default_is_taken(tree, how):
    if how == "a GPU":
        program(tree / "bin" / "nvidia-smi", "#!/bin/sh\necho GPU 0\n")
    done = install(tree, **({} if how == "a GPU" else {"TORCH_INDEX_URL": ""}))
    assert done.returncode == 0, done.stderr
    assert not any(CPU_INDEX in call for call in calls(tree))


def test_the_noise_of_pip_goes_to_a_file(tree):
    done = install(tree)
    assert "noise of pip" not in done.stdout + done.stderr
    assert (tree / ".venv" / "install.log").read_text().count("noise of pip") == 4
    assert "installing requirements/worker.txt ... " in done.stdout
    assert done.stdout.splitlines()[-1] == "WARNING: the avx2 kernels are missing"


def test_a_failure_shows_the_end_of_the_log_and_leaves_no_stamp(tree):
    done = install(tree, PIP_FAILS="worker.txt")
    assert done.returncode == 1
    assert "noise of pip" in done.stderr
    assert "install.log" in done.stderr
    assert list((tree / ".venv").glob(".baton-*")) == []
    assert install(tree).returncode == 0


def test_an_unsuitable_python_is_refused_with_the_versions(tree):
    done = install(tree, TOO_OLD="1")
    assert done.returncode == 1
    assert "Python 3.11, 3.12, 3.13 or 3.14" in done.stderr


def test_a_missing_redis_is_said_at_the_end(tree):
    assert install(tree, NO_REDIS="1").stdout.splitlines()[-1] == "No redis-server is here"
