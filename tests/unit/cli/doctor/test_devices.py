"""Checks of GPUs and RDMA devices on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.services.cli.doctor.devices import TorchDevices, check_gpu, check_rdma, has_rdma
from baton.services.cli.doctor.results import CheckStatus

OK, WARN, FAIL = CheckStatus
DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
CPU_BUILD = TorchDevices(None)
CUDA_BUILD = TorchDevices("13.0", ("NVIDIA H100, 80 GiB",))
BLIND = TorchDevices("13.0", (), "driver too old")


def put(root: Path, name: str, text: str = "") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("driver", "torch", "status", "words"),
    [
        (False, CPU_BUILD, OK, "CPU"),
        (True, CUDA_BUILD, OK, "H100, 80 GiB; driver 580.65.06, torch for CUDA 13.0"),
        (True, CPU_BUILD, WARN, "build for the CPU"),
        (True, BLIND, FAIL, "driver too old"),
        (True, None, WARN, "could not be asked"),
    ],
)
def test_gpu_driver_and_torch_fit(tmp_path, driver, torch, status, words):
    if driver:
        put(tmp_path, "proc/driver/nvidia/version", DRIVER)
    result = check_gpu(tmp_path, torch)
    assert result.status is status
    assert words in result.found


def test_a_card_without_a_driver_is_seen(tmp_path):
    put(tmp_path, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    put(tmp_path, "sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    result = check_gpu(tmp_path, CPU_BUILD)
    assert result.status is WARN
    assert "driver" in result.fix


def test_an_rdma_port_must_be_active(tmp_path):
    assert [result.status for result in check_rdma(tmp_path)] == [OK]
    assert not has_rdma(tmp_path)
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        put(tmp_path, f"sys/class/infiniband/{device}/ports/1/state", f"{state}\n")
        put(tmp_path, f"sys/class/infiniband/{device}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    put(tmp_path, "dev/infiniband/uverbs0")
    good, bad = check_rdma(tmp_path)
    assert has_rdma(tmp_path)
    assert (good.status, good.found) == (OK, "port 1 active, 400 Gb/sec (4X NDR)")
    assert (bad.status, bad.found) == (FAIL, "port 1 1: DOWN")


def test_a_container_without_the_device_files_fails(tmp_path):
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    *_, access = check_rdma(tmp_path)
    assert access.status is FAIL
    assert "--device /dev/infiniband" in access.fix
