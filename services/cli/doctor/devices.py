"""Checks of devices: NVIDIA GPUs with their driver, and RDMA ports. Reads files below a given root."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.services.cli.doctor.results import DoctorResult, fail, ok, warn

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


@dataclass(frozen=True, slots=True)
class TorchDevices:
    """The GPUs that torch of this environment can use, as its child process told."""

    cuda_build: str | None
    """CUDA version that torch was built for; None: a build for the CPU."""
    gpus: tuple[str, ...] = ()
    error: str = ""


def check_gpu(root: Path, torch: TorchDevices | None) -> DoctorResult:
    """GPU, driver and torch's build fit together. `torch` None: torch could not be asked."""
    driver = _driver_version(root)
    if driver is None:
        if _has_nvidia_card(root):
            return warn(
                "gpu", "an NVIDIA card without a driver", "install NVIDIA's driver; until then the CPU computes"
            )
        return ok("gpu", "none; workers compute on the CPU")
    if torch is None:
        return warn("gpu", f"driver {driver}; torch could not be asked", "mind the line about kernels first")
    if torch.cuda_build is None:
        fix = "install a CUDA build of torch (docs/gpu.md), or ignore this and compute on the CPU"
        return warn("gpu", f"driver {driver}, but torch is a build for the CPU", fix)
    if not torch.gpus:
        why = torch.error or "torch sees no GPU"
        fix = f"update the driver to one for CUDA {torch.cuda_build}, and check CUDA_VISIBLE_DEVICES and /dev/nvidia*"
        return fail("gpu", f"driver {driver}, torch for CUDA {torch.cuda_build}: {why}", fix)
    return ok("gpu", f"{'; '.join(torch.gpus)}; driver {driver}, torch for CUDA {torch.cuda_build}")


def _driver_version(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text)
    return found[1] if found else "of unknown version"


def _has_nvidia_card(root: Path) -> bool:
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES):
            return True
    return False


def has_rdma(root: Path) -> bool:
    """True if the kernel knows an RDMA device."""
    return any((root / "sys/class/infiniband").glob("*"))


def check_rdma(root: Path) -> Iterator[DoctorResult]:
    """Every RDMA device has an active port, and processes may open it."""
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    if not devices:
        yield ok("rdma", "no devices; between machines pages go over TCP")
        return
    for device in devices:
        yield _check_device(device)
    if not any((root / "dev/infiniband").glob("uverbs*")):
        fix = "give the container /dev/infiniband (docker: --device /dev/infiniband), or load ib_uverbs"
        yield fail("rdma access", "there is no /dev/infiniband/uverbs*", fix)


def _check_device(device: Path) -> DoctorResult:
    name = f"rdma {device.name}"
    ports = [(port.name, _first_line(port / "state"), _first_line(port / "rate")) for port in _ports(device)]
    active = [f"port {port} active, {rate}" for port, state, rate in ports if "ACTIVE" in state]
    if not active:
        states = ", ".join(f"port {port} {state or 'unknown'}" for port, state, _ in ports) or "no port"
        return fail(name, states, f"check cable, switch and subnet manager (ibstat {device.name})")
    return ok(name, ", ".join(active))


def _ports(device: Path) -> list[Path]:
    return sorted((device / "ports").glob("*"))


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
