"""`baton cache`: what is shown, what goes, and that nothing in use does."""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.model.kernels.build import SUFFIX_INDEX, build_specs, is_current
from baton.model.weight_file import inventory
from baton.model.weight_file.cache import CachedWeights
from baton.model.weight_file.inventory import kernel_entries, removable
from baton.services.cli.main import run

OLD_S = 20 * 24 * 3600


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own, empty directory of weights; no kernels, as those of this checkout must stay."""
    monkeypatch.setattr("baton.services.cli.cache.command.kernel_entries", lambda now: [])
    path = tmp_path / "weights"
    path.mkdir(mode=0o700)
    return path


def packed(directory: Path, key: str) -> CachedWeights:
    """Real weights, as a worker packs them."""
    weights = CachedWeights(directory, key)
    weights.publish([torch.arange(1000, dtype=torch.float32)], "{}")
    return weights


def age(path: Path) -> None:
    os.utime(path, (time.time() - OLD_S, time.time() - OLD_S))


def cache(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert run(["cache", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def names(entries: list[dict[str, Any]]) -> list[str]:
    return [Path(entry["path"]).name for entry in entries]


def test_old_weights_go_unless_a_process_maps_them(directory: Path, capsys: pytest.CaptureFixture[str]):
    where = ("--weight-cache-dir", str(directory))
    used, unused, young = (packed(directory, key) for key in ("used", "unused", "young"))
    opened = used.open(num_threads=1)
    age(used.path)
    age(unused.path)
    shown = {Path(entry["path"]).name: entry for entry in cache(capsys, "list", *where)["entries"]}
    assert shown.keys() == {"used.weights", "unused.weights", "young.weights"}
    assert shown["used.weights"]["users"] == [os.getpid()]
    assert shown["unused.weights"]["users"] == []
    assert shown["unused.weights"]["bytes"] == unused.path.stat().st_size
    assert shown["unused.weights"]["age_s"] == pytest.approx(OLD_S, abs=60)
    assert names(cache(capsys, "gc", *where, "--dry-run")["removed"]) == ["unused.weights"]
    assert unused.path.exists()
    assert names(cache(capsys, "gc", *where)["removed"]) == ["unused.weights"]
    assert not unused.path.exists()
    assert used.path.exists()
    assert young.path.exists()
    assert names(cache(capsys, "gc", *where, "--older-than-days", "0")["removed"]) == ["young.weights"]
    assert opened is not None
    assert float(opened.tensors[0].sum()) == 499500.0
    del opened
    assert names(cache(capsys, "gc", *where)["removed"]) == ["used.weights"]


def test_an_unfinished_file_stays_while_its_packer_lives(directory: Path, capsys: pytest.CaptureFixture[str]):
    unfinished = directory / "key.tmp"
    unfinished.write_bytes(b"half")
    age(unfinished)
    packer = CachedWeights(directory, "key").lock()
    assert packer.try_acquire()
    answer = cache(capsys, "gc", "--weight-cache-dir", str(directory), code=1)
    assert answer["failed"] == {str(unfinished): "it is being written, or another user's"}
    assert unfinished.exists()
    packer.close()
    assert names(cache(capsys, "gc", "--weight-cache-dir", str(directory))["removed"]) == ["key.tmp"]
    assert not unfinished.exists()


def test_links_and_foreign_files_are_left_alone(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "precious.weights"
    target.write_bytes(b"x")
    (directory / "link.weights").symlink_to(target)
    (directory / "notes.txt").write_text("mine")
    assert cache(capsys, "gc", "--weight-cache-dir", str(directory), "--older-than-days", "0")["removed"] == []
    assert sorted(path.name for path in directory.iterdir()) == ["link.weights", "notes.txt"]
    assert target.exists()


def test_a_missing_directory_is_empty_and_a_missing_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["cache", "list", "--model", str(tmp_path / "none")]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    assert inventory.weight_entries(tmp_path / "none", time.time()) == []


def test_people_see_sizes_and_a_sum(directory: Path, capsys: pytest.CaptureFixture[str]):
    age(packed(directory, "key").path)
    assert run(["cache", "gc", "--weight-cache-dir", str(directory), "--dry-run"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "20.0 d  weights  unused" in first
    assert last.startswith("would remove 1 entries, ")


def test_current_kernels_stay_and_leftovers_of_builds_go(tmp_path: Path):
    current = {spec.path for spec in (*build_specs(), SUFFIX_INDEX) if is_current(spec)}
    assert not current & {entry.path for entry in kernel_entries(time.time()) if removable(entry, 0.0)}
    mapped, old, scratch = tmp_path / "mapped.so", tmp_path / "old.so", tmp_path / "tmpabc"
    mapped.write_bytes(b"x" * 4096)
    old.write_bytes(b"x")
    scratch.mkdir()
    (scratch / "half.so").write_bytes(b"12345")
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        found = {entry.path.name: entry for entry in kernel_entries(time.time(), tmp_path)}
        assert found["mapped.so"].users == (os.getpid(),)
    assert found["tmpabc"].num_bytes == 5
    assert {name for name, entry in found.items() if removable(entry, 0.0)} == {"old.so", "tmpabc"}
    assert inventory.remove(found["tmpabc"])
    assert not scratch.exists()
