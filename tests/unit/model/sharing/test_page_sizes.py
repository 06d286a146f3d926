"""A weight file that the kernel has on small pages is read anew, unless a process maps it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from baton.model.loading.config import DtypeChoice
from baton.model.loading.identity import checkpoint_root
from baton.model.loading.loader import LoadedModel
from baton.model.sharing.shared_weights import (
    MIN_HUGE_FRACTION,
    SharingPlan,
    WeightSharing,
    _has_huge_pages,
    _SharedLoader,
    load_shared_model,
)
from baton.model.sharing.weight_key import LoadOptions
from baton.model.smaps import measure_memory
from baton.model.weight_file import cache as cache_module
from baton.model.weight_file.cache import CachedWeights
from baton.model.weight_file.format import WeightFile, open_weight_file
from baton.model.weight_file.mapping import map_file
from tests import tiny_models
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="only weights of native kernels are shared")

FLOAT32 = LoadOptions(dtype=DtypeChoice.FLOAT32)
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
"""Of a model whose file has several huge pages."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**tiny_models.small_shape(**LARGE))
    return tiny_models.save_random_config(config, tmp_path_factory.mktemp("llama"))


def load(directory: Path, cache: Path, events: list[str], sharing: WeightSharing = WeightSharing.AUTO) -> LoadedModel:
    plan = SharingPlan(sharing, [cache], lambda event, **_: events.append(event))
    return load_shared_model(directory, lambda: checkpoint_root(directory), FLOAT32, plan)


def huge_fraction_of(path: Path) -> float:
    file = os.open(path, os.O_RDONLY)
    try:
        memory = measure_memory(open_weight_file(file).tensors)
    finally:
        os.close(file)
    assert memory is not None
    return memory.huge_fraction


def read_on_small_pages(path: Path) -> None:
    """Drops the file from the page cache and reads it piece by piece, backwards."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        for start in reversed(range(0, os.fstat(file).st_size, mmap.PAGESIZE)):
            os.pread(file, mmap.PAGESIZE, start)
    finally:
        os.close(file)


@pytest.fixture
def small_pages(model: Path, tmp_path: Path) -> Path:
    """A weight file on small pages, where files can be on either."""
    if not _has_huge_pages():
        pytest.skip("no huge pages here")
    load(model, tmp_path, [])
    [path] = tmp_path.glob("*.weights")
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    if huge_fraction_of(path) < MIN_HUGE_FRACTION:
        pytest.skip("this file system has no huge pages")
    read_on_small_pages(path)
    assert huge_fraction_of(path) < MIN_HUGE_FRACTION
    return path


def test_a_file_on_small_pages_is_read_anew_and_shared(model: Path, small_pages: Path):
    events: list[str] = []
    memory = load(model, small_pages.parent, events).report.memory
    assert events == ["weights_read_anew"]
    assert memory is not None
    assert memory.shared_bytes == memory.num_bytes
    assert memory.huge_fraction >= MIN_HUGE_FRACTION
    read_on_small_pages(small_pages)
    load(model, small_pages.parent, events)
    assert events == ["weights_read_anew"], "not again within an hour: it may be of no use"


def test_workers_that_start_at_once_read_it_anew_once(model: Path, small_pages: Path):
    """None holds its mapping while another one has the pages dropped."""
    events: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        loaded = [pool.submit(load, model, small_pages.parent, events) for _ in range(4)]
        memories = [one.result().report.memory for one in loaded]
    assert events == ["weights_read_anew"]
    assert all(memory is not None and memory.shared_bytes == memory.num_bytes for memory in memories)


def test_a_file_that_somebody_maps_is_copied_as_before(model: Path, small_pages: Path):
    file = os.open(small_pages, os.O_RDONLY)
    mapped = map_file(file, os.fstat(file).st_size)
    os.close(file)
    before = mapped.clone()
    events: list[str] = []
    loaded = load(model, small_pages.parent, events)
    assert events == ["weights_still_on_small_pages"], "nothing was read anew"
    assert loaded.report.memory is not None
    assert loaded.report.memory.shared_bytes == 0
    assert "of the file is on huge pages" in loaded.report.sharing_note
    assert torch.equal(mapped, before)


@pytest.mark.parametrize("refused", [fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_SH])
def test_refused_locks_leave_weights_shared(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int):
    """NFS refuses the exclusive lock of a file that is open to be read; other file systems have no locks."""
    load(model, tmp_path, [])
    flock, asked = fcntl.flock, list[int]()

    def refuse(file: int, kind: int) -> None:
        asked.append(kind)
        if kind & refused:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(_SharedLoader, "_is_on_small_pages", lambda *_: True)
    memory = load(model, tmp_path, [], WeightSharing.ALWAYS).report.memory
    assert {kind & ~fcntl.LOCK_NB for kind in asked} == {fcntl.LOCK_EX, fcntl.LOCK_SH}
    assert memory is not None
    assert memory.shared_bytes == memory.num_bytes


def test_within_the_hour_a_file_is_verified_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load(model, tmp_path, [])
    opened: list[int] = []
    opens, events = CachedWeights.open, list[str]()

    def counted(self: CachedWeights, num_threads: int) -> WeightFile | None:
        opened.append(num_threads)
        return opens(self, num_threads)

    monkeypatch.setattr(CachedWeights, "open", counted)
    monkeypatch.setattr(CachedWeights, "may_drop_pages", lambda self: False)
    monkeypatch.setattr(_SharedLoader, "_is_on_small_pages", lambda *_: True)
    load(model, tmp_path, events, WeightSharing.ALWAYS)
    assert (len(opened), events) == (1, [])


def test_a_dropped_file_is_first_written_to_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel drops no page that it has yet to write, and a failed write must not use up the hour."""
    cached, calls = CachedWeights(tmp_path, "key"), list[str]()
    os.close(os.open(cached.path, os.O_CREAT, 0o600))
    for name in ("fsync", "setxattr", "posix_fadvise"):
        monkeypatch.setattr(os, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(cache_module, "_may_drop", lambda file: True)
    assert cached.drop_pages()
    assert calls == ["fsync", "setxattr", "posix_fadvise"]


@pytest.mark.parametrize(
    ("noted", "may"),
    [(b"1000", False), (b"-2601", True), (b"4601", True), (b"x", True), (errno.ENODATA, True), (errno.ENOTSUP, False)],
)
def test_pages_are_dropped_once_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bytes | int, may: bool):
    """At second 1000 of Unix time. A time in the future is of a clock that was wrong."""

    def attribute(*_: object) -> bytes:
        if isinstance(noted, int):
            raise OSError(noted, os.strerror(noted))
        return noted

    cached = CachedWeights(tmp_path, "key")
    assert not cached.may_drop_pages(), "there is no file"
    os.close(os.open(cached.path, os.O_CREAT, 0o600))
    monkeypatch.setattr(os, "getxattr", attribute)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert cached.may_drop_pages() is may
