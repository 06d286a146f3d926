"""A weight file gives back the bytes it was written from, or is refused."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.model.smaps import WeightMemory, measure_memory
from baton.model.weight_file import format, mapping
from baton.model.weight_file.format import DamagedFile, WeightFile, open_weight_file, write_weight_file

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int32)


def random_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (300, 70), (1,), (64, 64), (5, 3, 2)]
    return [
        torch.randint(-90, 90, shape, generator=generator).to(dtype)
        for shape, dtype in zip(shapes, (*DTYPES, torch.float32), strict=True)
    ]


@pytest.fixture(autouse=True)
def short_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small file has many, and tensors begin and end inside of them."""
    monkeypatch.setattr(format, "STRIPE_BYTES", 8192)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of `random_tensors`."""
    path = tmp_path / "weights"
    write(path, random_tensors(), "the manifest")
    return path


def write(path: Path, tensors: list[torch.Tensor], manifest: str) -> None:
    with path.open("w+b") as file:
        write_weight_file(file.fileno(), tensors, manifest)


def read(path: Path) -> WeightFile:
    with path.open("rb") as file:
        return open_weight_file(file.fileno(), num_threads=2)


def damaged(path: Path) -> Iterator[str]:
    """The message, if the file is refused."""
    with pytest.raises(DamagedFile) as error:
        read(path)
    yield str(error.value)


def test_tensors_and_manifest_come_back(path: Path):
    found = read(path)
    assert found.manifest == "the manifest"
    for tensor, source in zip(found.tensors, random_tensors(), strict=True):
        assert tensor.dtype is source.dtype
        assert tensor.data_ptr() % format.ALIGNMENT == 0
        assert torch.equal(tensor, source)


@given(sizes=st.lists(st.integers(0, 20_000), max_size=6))
def test_any_sizes_come_back(sizes: list[int], tmp_path_factory: pytest.TempPathFactory):
    tensors = [torch.arange(size).to(torch.int8) for size in sizes]
    path = tmp_path_factory.mktemp("any") / "weights"
    write(path, tensors, "")
    assert all(torch.equal(*pair) for pair in zip(read(path).tensors, tensors, strict=True))


def test_a_flip_of_any_byte_is_noticed(path: Path):
    whole = path.read_bytes()
    footer = whole.rindex(b'{"magic"')
    used = [*range(0, footer, 997), *range(footer, len(whole.rstrip(b" ")), 7)]
    for place in used:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        next(damaged(path))


@pytest.mark.parametrize("kept", [0, 1, 4095, 4096, 50_000, -4096, -1])
def test_a_cut_file_is_refused(path: Path, kept: int):
    path.write_bytes(path.read_bytes()[:kept])
    next(damaged(path))


def test_a_torn_file_is_refused(path: Path):
    """Blocks that never reached the disk read as zeros, though the end was written."""
    whole = bytearray(path.read_bytes())
    whole[8192:16384] = bytes(8192)
    path.write_bytes(whole)
    assert "stripe 1 of" in next(damaged(path))


def test_a_file_of_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(format, "FORMAT_VERSION", 2)
    assert "version 1, not 2" in next(damaged(path))


def test_a_longer_file_is_refused(path: Path):
    path.write_bytes(b"x" * 4096 + path.read_bytes())
    assert "another size" in next(damaged(path))


def test_a_full_disk_is_noticed_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "weights", random_tensors(), "")
    assert (tmp_path / "weights").stat().st_size == 0


def test_a_mapping_lives_as_long_as_its_tensors(path: Path):
    tensor = read(path).tensors[1]
    address = f"{tensor.data_ptr() & ~0xFFF:x}"
    assert torch.equal(tensor, random_tensors()[1])
    assert any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines()), address
    del tensor
    assert not any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="no huge pages here")
def test_a_file_on_small_pages_is_measured_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Shared all the same: the two labels are apart, and each is what the kernel says."""
    monkeypatch.setattr(mapping, "ADVICE", mmap.MADV_NOHUGEPAGE)
    write(tmp_path / "weights", [torch.ones(8 * 2**20, dtype=torch.int8)], "")
    memory = measure_memory(read(tmp_path / "weights").tensors)
    assert memory == WeightMemory(num_bytes=8 * 2**20, huge_bytes=0, shared_bytes=8 * 2**20)


def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path: Path):
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match=r"No such device|Permission|Invalid"):
            mapping.map_file(reader, 4096)
    finally:
        os.close(reader)
        os.close(writer)
