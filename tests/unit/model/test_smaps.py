"""Tensors' memory is counted over the mappings that hold them, from the kernel's own text."""

from pathlib import Path

import pytest
import torch

from baton.model import smaps
from baton.model.smaps import WeightMemory, measure_memory

FIELDS = (
    "Size: 8 kB\nRss: 8 kB\nAnonHugePages: {anon} kB\nShmemPmdMapped: 0 kB\nFilePmdMapped: {file} kB\nVmFlags: rd\n"
)


def mapping(low: int, high: int, permissions: str, anon: int = 0, file: int = 0) -> str:
    return f"{low:x}-{high:x} {permissions} 00000000 00:00 0    /lib/x\n" + FIELDS.format(anon=anon, file=file)


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.zeros(4096, dtype=torch.uint8)


def test_a_tensor_over_two_mappings_counts_in_both(monkeypatch, tmp_path: Path, tensor):
    start = tensor.data_ptr()
    middle, end = start + 1024, start + tensor.nbytes
    text = (
        mapping(start - 8192, start, "r--s", anon=8)  # ends where the tensor begins
        + mapping(start, middle, "r--s", file=512)
        + mapping(middle, end + 4096, "rw-p", anon=1)
        + mapping(end + 4096, end + 8192, "r--s", anon=8)
    )
    (tmp_path / "smaps").write_text(text)
    monkeypatch.setattr(smaps, "SMAPS", tmp_path / "smaps")
    assert measure_memory([tensor, tensor]) == WeightMemory(4096, huge_bytes=1024 + 1024, shared_bytes=1024)
    assert measure_memory([]) == WeightMemory(0, 0, 0)


def test_only_mappings_that_hold_tensors_are_read_in_full(monkeypatch, tensor):
    """A worker has more than a thousand mappings."""
    start = tensor.data_ptr()
    others = "".join(mapping(low, low + 4096, "r-xp") for low in range(0, 4096 * 1000, 4096))
    text = others + mapping(start, start + tensor.nbytes, "rw-p", anon=2)
    found = list(smaps._mappings(text.encode(), start, start + tensor.nbytes))
    assert found == [(start, start + tensor.nbytes, "rw-p", 2048)]
