"""Only whole files of this user are mapped, whatever else lies in the directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from baton.model.weight_file import cache as cache_module
from baton.model.weight_file.cache import CachedWeights
from baton.model.weight_file.inventory import EXPIRY_S
from baton.model.weight_file.ownership import ForeignFile

TENSORS = [torch.arange(5000)]


@pytest.fixture
def cached(tmp_path: Path) -> CachedWeights:
    cached = CachedWeights(tmp_path / "cache", "key")
    cached.publish(TENSORS, "manifest")
    return cached


def test_a_published_file_is_private_to_the_user(cached: CachedWeights):
    opened = cached.open(1)
    assert opened is not None
    assert torch.equal(opened.tensors[0], TENSORS[0])
    assert cached.path.stat().st_mode & 0o777 == 0o600
    assert cached.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_missing_file_is_no_error(tmp_path: Path):
    assert CachedWeights(tmp_path / "cache", "key").open(1) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_never_mapped(cached: CachedWeights, mode: int):
    cached.path.chmod(mode)
    with pytest.raises(ForeignFile, match=f"mode {mode:o}"):
        cached.open(1)


def test_another_users_file_is_never_mapped(cached: CachedWeights, monkeypatch: pytest.MonkeyPatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ForeignFile, match=f"belongs to user {user}"):
        cached.open(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_was_given_to_another_user_is_never_mapped(cached: CachedWeights):
    os.chown(cached.path, 65534, 65534)
    with pytest.raises(ForeignFile, match="belongs to user 65534"):
        cached.open(1)


def test_a_link_is_not_followed(cached: CachedWeights):
    moved = cached.path.rename(cached.path.with_name("elsewhere"))
    cached.path.symlink_to(moved)
    with pytest.raises(OSError, match="symbolic links"):
        cached.open(1)


@pytest.mark.parametrize("kind", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_opened(cached: CachedWeights, kind: object):
    assert callable(kind)
    cached.path.unlink()
    kind(cached.path)
    with pytest.raises(ForeignFile, match="of another kind"):
        cached.open(1)


def test_a_directory_that_others_may_write_is_refused(cached: CachedWeights):
    cached.path.parent.chmod(0o777)
    with pytest.raises(ForeignFile, match="mode 777"):
        CachedWeights(cached.path.parent, "key")
    cached.path.parent.chmod(0o700)


def test_a_directory_behind_a_link_is_refused(cached: CachedWeights, tmp_path: Path):
    (tmp_path / "link").symlink_to(cached.path.parent)
    with pytest.raises(ForeignFile, match="is a link"):
        CachedWeights(tmp_path / "link", "key")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(cached: CachedWeights, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(cache_module, "write_weight_file", fail)
    with pytest.raises(OSError, match="the disk fails"):
        cached.publish([torch.zeros(9)], "other")
    opened = cached.open(1)
    assert opened is not None
    assert opened.manifest == "manifest"
    assert [path.name for path in cached.path.parent.iterdir()] == [cached.path.name]


def test_what_a_killed_packer_left_is_replaced(cached: CachedWeights):
    cached.path.with_name("key.tmp").write_bytes(b"half")
    cached.publish([torch.zeros(9)], "other")
    assert [path.name for path in cached.path.parent.iterdir()] == [cached.path.name]


def test_a_mapped_file_outlives_its_replacement(cached: CachedWeights):
    opened = cached.open(1)
    assert opened is not None
    cached.publish([torch.zeros(9)], "other")
    assert torch.equal(opened.tensors[0], TENSORS[0])


def test_files_that_nobody_uses_any_more_are_unlinked(cached: CachedWeights):
    old, young = (CachedWeights(cached.path.parent, name) for name in ("old", "young"))
    for other, age_s in ((old, EXPIRY_S + 60), (young, EXPIRY_S - 3600)):
        other.publish(TENSORS, "")
        at = other.path.stat().st_mtime - age_s
        os.utime(other.path, (at, at))
    cached.publish(TENSORS, "")
    assert not old.path.exists()
    assert young.open(1) is not None
    assert young.path.stat().st_mtime > cached.path.stat().st_mtime - 60, "a use makes it young again"
