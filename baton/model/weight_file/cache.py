"""Where weight files are kept: one directory, one file a key, one process that packs.

A file appears under its name only when it is whole, and never changes afterwards. A replaced or expired one is
unlinked, which processes that map it do not notice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from baton.model.weight_file.format import WeightFile, open_weight_file, write_weight_file
from baton.model.weight_file.inventory import EXPIRY_S, UNFINISHED, WEIGHTS
from baton.model.weight_file.lock import FileLock
from baton.model.weight_file.ownership import open_own, own_directory


class CachedWeights:
    """The file of one key in a directory. Every method raises `ForeignFile` or `OSError` where the directory fails."""

    def __init__(self, directory: Path, key: str) -> None:
        """Makes the directory if it is missing."""
        own_directory(directory)
        self._directory = directory
        self._key = key
        self.path = directory / f"{key}{WEIGHTS}"

    def lock(self) -> FileLock:
        """The lock of whoever packs this key."""
        return FileLock(self._directory / f"{self._key}.lock")

    def open(self, num_threads: int) -> WeightFile | None:
        """The mapped and verified file; None if there is none. Raises `DamagedFile`, too."""
        try:
            file = open_own(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            opened = open_weight_file(file, num_threads)
            with suppress(OSError):
                os.utime(file)
            return opened
        finally:
            os.close(file)

    def publish(self, tensors: Sequence[torch.Tensor], manifest: str) -> None:
        """Writes the file in place of any other of this key. The caller holds the lock."""
        self._unlink_leftovers()
        unfinished = self._directory / f"{self._key}{UNFINISHED}"
        try:
            file = open_own(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                write_weight_file(file, tensors, manifest)
            finally:
                os.close(file)
            os.replace(unfinished, self.path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync_directory(self._directory)

    def _unlink_leftovers(self) -> None:
        """Removes what a killed packer of this key left, and expired files of others."""
        (self._directory / f"{self._key}{UNFINISHED}").unlink(missing_ok=True)
        oldest = time.time() - EXPIRY_S
        for path in self._directory.glob(f"*{WEIGHTS}"):
            with suppress(OSError):
                if path.lstat().st_mtime < oldest:
                    path.unlink()


def _sync_directory(path: Path) -> None:
    """Makes a rename durable. Without it a power cut brings the old name back, which the digests tell."""
    with suppress(OSError):
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
