"""`scripts/install.sh` with a stand-in for Python that records what it is asked: choices, quiet output, failures."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

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

DRIVER_FILE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {0}  Release Build  (root@host)\nGCC version: gcc 12.2.0"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install.sh", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    for name in ("worker", "dev", "gpu", "build", "proto"):
        (tmp_path / "requirements" / f"{name}.txt").write_text("")
    for name in ("pyproject.toml", "hatch_build.py"):
        (tmp_path / name).write_text("")
    program(tmp_path / "bin" / "python", PYTHON)
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def nvidia_smi(tree: Path, driver: str) -> None:
    """A stand-in that knows one GPU with this driver; with an empty one it fails, as without a device."""
    program(
        tree / "bin" / "nvidia-smi",
        f'#!/bin/sh\n[ -n "{driver}" ] || {{ echo "No devices were found"; exit 6; }}\necho {driver}\n',
    )


def install(tree: Path, level: str = "run", **variables: str) -> subprocess.CompletedProcess[str]:
    # A machine of its own: nothing of the host's PATH but the shell's tools, so no nvidia-smi of the host.
    environment = {
        "PATH": f"{tree / 'bin'}:{tools(tree)}",
        "PYTHON": str(tree / "bin" / "python"),
        "TORCH_INDEX_URL": CPU_INDEX,
        "NVIDIA_DRIVER_FILE": str(tree / "driver"),
        **variables,
    }
    command = [str(tools(tree) / "bash"), str(tree / "scripts" / "install.sh"), level]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def tools(tree: Path) -> Path:
    """A folder of links to the programs that the script uses."""
    folder = tree / "tools"
    if not folder.is_dir():
        folder.mkdir()
        for name in "bash cat cp cut dirname flock grep head mkdir rm sha256sum sh tail touch".split():
            (folder / name).symlink_to(shutil.which(name) or "/nonexistent")
    return folder


def locks(tree: Path) -> list[str]:
    """The locks that were installed, in order."""
    words = [word for call in calls(tree) for word in call.split()]
    return [Path(word).stem for word in words if word.startswith("requirements/")]


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


def test_without_an_index_for_cpus_the_default_is_taken(tree):
    assert install(tree, TORCH_INDEX_URL="").returncode == 0
    assert not any(CPU_INDEX in call for call in calls(tree))
    assert locks(tree) == ["worker", "build"]


@pytest.mark.parametrize("seen_by", ["nvidia-smi", "the kernel's file"])
@pytest.mark.parametrize(("level", "expected"), [("run", ["gpu", "build"]), ("dev", ["dev", "gpu", "proto"])])
def test_a_gpu_brings_torch_for_cuda_and_the_extra_gpu(tree, level, expected, seen_by):
    if seen_by == "nvidia-smi":
        nvidia_smi(tree, "580.65.06")
    else:
        (tree / "driver").write_text(DRIVER_FILE.format("580.65.06"))
    done = install(tree, level)
    assert done.returncode == 0, done.stderr
    assert calls(tree)[0].endswith(" torch==2.13.0")
    assert not any(CPU_INDEX in call for call in calls(tree))
    assert locks(tree) == expected


def test_nvidia_smi_without_a_device_is_no_gpu(tree):
    nvidia_smi(tree, "")
    (tree / "driver").write_text(DRIVER_FILE.format("580.65.06"))
    assert install(tree).returncode == 0
    assert CPU_INDEX in calls(tree)[0]
    assert locks(tree) == ["worker", "build"]


def test_a_driver_too_old_for_the_build_is_said_and_the_cpu_computes(tree):
    nvidia_smi(tree, "570.172.08")
    done = install(tree)
    assert CPU_INDEX in calls(tree)[0]
    assert locks(tree) == ["worker", "build"]
    assert "driver 570.172.08 is older than 580" in done.stdout


def test_a_named_build_of_torch_comes_without_the_extra_of_another_cuda(tree):
    nvidia_smi(tree, "570.172.08")
    assert install(tree, TORCH="torch==2.13.0+cu126").returncode == 0
    assert calls(tree)[0].endswith(" torch==2.13.0+cu126")
    assert locks(tree) == ["worker", "build"]


def test_a_gpu_that_is_added_later_is_noticed(tree):
    assert install(tree).returncode == 0
    before = len(calls(tree))
    assert install(tree).returncode == 0
    assert len(calls(tree)) == before
    nvidia_smi(tree, "580.65.06")
    assert install(tree).returncode == 0
    assert locks(tree) == ["worker", "build", "gpu", "build"]


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


def test_a_python_without_a_protoc_is_installed_all_the_same(tree):
    """The pinned one has no wheels for 3.14, where pip would compile it for many minutes."""
    done = install(tree, "dev", PIP_FAILS="proto.txt")
    assert done.returncode == 0, done.stderr
    assert locks(tree) == ["dev", "proto"]
    (protoc,) = [call for call in calls(tree) if "proto.txt" in call]
    assert "--only-binary :all:" in protoc
    assert "no protoc here, which `make proto` alone needs" in done.stdout
    assert [*(tree / ".venv").glob(".baton-dev-*")] != []


def test_an_unsuitable_python_is_refused_with_the_versions(tree):
    done = install(tree, TOO_OLD="1")
    assert done.returncode == 1
    assert "Python 3.11, 3.12, 3.13 or 3.14" in done.stderr


def test_a_missing_redis_is_said_at_the_end(tree):
    assert install(tree, NO_REDIS="1").stdout.splitlines()[-1] == "No redis-server is here"


def test_ci_runs_every_python_that_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == declared
    assert all(f"python{version}" in (ROOT / "scripts" / "install.sh").read_text() for version in declared)
    for page in ("README.md", "CONTRIBUTING.md", "docs/tutorials/laptop.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"You need Linux, Python {declared[0]} to {declared[-1]}" in text, page


def test_both_ways_to_run_ci_install_the_same():
    """What a test needs must be fetched by the script and by the workflow."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    of_script = [
        word for line in re.findall(r"\bmake --no-print-directory ([a-z -]+)<", script) for word in line.split()
    ]
    (of_workflow,) = re.findall(r"run: make (.+)", workflow)
    assert of_script == of_workflow.split()
