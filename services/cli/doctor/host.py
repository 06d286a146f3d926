"""Checks of the host: Python, packages, CPU, memory, lock limit and huge pages.

Reads files below a given root, so that tests can show a machine that is not there.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from baton.services.cli.doctor.results import DoctorResult, fail, ok, warn
from baton.services.cli.worker_packages import WORKER_PACKAGES, absent

OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 14)
MIN_AVAILABLE_BYTES = 2 * 1024**3
"""A prefill and a decode worker with default pools and the bundled model."""

_SHOWN = ("torch", "transformers", "safetensors")
_NIXL_PACKAGES = {"nixl_cu12": "nixl-cu12", "nixl_cu13": "nixl-cu13"}
_GIB = 1024**3


def check_python(version: tuple[int, int] | None = None) -> DoctorResult:
    """Python's version is one that Baton is tested with."""
    number = version or sys.version_info[:2]
    found = f"{platform.python_version() if version is None else '.'.join(map(str, number))} ({sys.executable})"
    if number < OLDEST_PYTHON:
        return fail("python", found, "install Python 3.11 or later and Baton into a virtual environment of it")
    if number > NEWEST_PYTHON:
        return warn("python", f"{found} is newer than any that Baton was tested with", "use Python 3.11 to 3.14")
    return ok("python", found)


def check_packages(missing: frozenset[str] | None = None) -> Iterator[DoctorResult]:
    """The packages of the extras `worker` and `nixl`. `missing`: import names that count as absent; tests set it."""
    lacking = missing if missing is not None else absent((*WORKER_PACKAGES, *_NIXL_PACKAGES))
    lost = [package for name, package in WORKER_PACKAGES.items() if name in lacking]
    if lost:
        fix = "pip install 'baton-serve[worker]' (a router alone needs none of them)"
        yield fail("packages", f"workers cannot run without {', '.join(lost)}", fix)
    else:
        yield ok("packages", ", ".join(f"{name} {_version(name)}" for name in _SHOWN))
    installed = [package for name, package in _NIXL_PACKAGES.items() if name not in lacking]
    if installed:
        yield ok("nixl package", ", ".join(f"{package} {_version(package)}" for package in installed))
    else:
        fix = "pip install 'baton-serve[nixl]' (without it pages go over gRPC, several times slower)"
        yield warn("nixl package", "not installed", fix)


def nixl_missing() -> bool:
    """True if no build of NIXL is installed."""
    return len(absent(tuple(_NIXL_PACKAGES))) == len(_NIXL_PACKAGES)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def check_cpu(root: Path, machine: str | None = None) -> DoctorResult:
    """The instruction sets that the native kernels have levels for."""
    kind = machine or platform.machine()
    if kind not in ("x86_64", "AMD64"):
        return ok("cpu", f"{kind}: kernels are portable C++")
    flags = re.search(r"^flags\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    words = set(flags[1].split()) if flags else set()
    shown = [name for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if name in words]
    if not {"avx2", "fma"} <= words:
        fix = "run workers on a CPU with AVX2, or pass AVX2 through to this virtual machine"
        return warn("cpu", f"{kind} without AVX2 and FMA: portable kernels are several times slower", fix)
    return ok("cpu", f"{kind} with {' '.join(shown)}")


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name, such as "AMD EPYC 9R14"; empty where the kernel does not tell."""
    found = re.search(r"^model name\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return "" if found is None else found[1].strip()


def available_bytes(root: Path) -> int | None:
    """Memory that new processes can have; None if the kernel does not tell."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def check_memory(root: Path) -> DoctorResult:
    """Memory that new processes can have."""
    available = available_bytes(root)
    if available is None:
        return warn("memory", "the kernel does not tell", "look at `free -g`")
    if available < MIN_AVAILABLE_BYTES:
        fix = "end other programs, or give workers a smaller pool, such as --kv-memory-mib 64"
        return fail("memory", f"{available / _GIB:.1f} GiB available", fix)
    return ok("memory", f"{available / _GIB:.1f} GiB available")


def check_memlock(has_rdma: bool, limit_bytes: int | None = None) -> DoctorResult:
    """The limit of locked memory: RDMA pins the whole pool. `limit_bytes` of -1 is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit_bytes is None else limit_bytes
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    if has_rdma and limit != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited (a container: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
        return fail("memlock", f"{found}, but RDMA locks the pool", fix)
    return ok("memlock", found if has_rdma else f"{found}; nothing needs it without RDMA devices")


def check_huge_pages(root: Path) -> DoctorResult:
    """The mode of transparent huge pages: pools and weights ask for them with `madvise`."""
    modes = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", modes)
    if chosen is None:
        return warn("huge pages", "the kernel has none", "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
    if chosen[1] == "never":
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return warn("huge pages", "switched off; transfers and decode steps are slower", fix)
    return ok("huge pages", f"mode {chosen[1]}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
