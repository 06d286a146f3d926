"""Where weight files are kept: one directory, one file a key, one process that packs.

A file appears under its name only when it is whole, and never changes afterwards. A replaced or expired one is
unlinked, which processes that map it do not notice.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from baton.model.weight_file.format import WeightFile, open_weight_file, write_weight_file
from baton.model.weight_file.inventory import EXPIRY_S, UNFINISHED, WEIGHTS
from baton.model.weight_file.lock import FileLock, LockTimeout
from baton.model.weight_file.ownership import open_own, own_directory

REREAD_INTERVAL_S = 3600.0
"""Shortest time between two times that a file is read anew to get it on huge pages."""
DROPPED_AT = "user.baton.dropped_at"
"""Attribute of a weight file: when its pages were dropped last, in seconds of Unix time."""


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

    @contextmanager
    def reading(self, timeout_s: float, *, alone: bool = False) -> Iterator[bool]:
        """Keeps others from dropping the file's pages within the context; `alone`: from opening the file, too.

        Gives False, and keeps nobody, without a file, after `timeout_s`, or where the file system refuses the lock: NFS
        has no exclusive one for a file that is open to be read.
        """
        try:
            lock = FileLock(self.path, shared=not alone, create=False)
        except FileNotFoundError:
            yield False
            return
        try:
            held = True
            try:
                if not lock.try_acquire():
                    lock.acquire(timeout_s)
            except (LockTimeout, OSError):
                held = False
            yield held
        finally:
            lock.close()

    def may_drop_pages(self) -> bool:
        """False within `REREAD_INTERVAL_S` of the last time, which may have been no use, or if it cannot be noted."""
        try:
            file = open_own(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return _may_drop(file)
        finally:
            os.close(file)

    def drop_pages(self) -> bool:
        """Has the kernel forget what it has read of the file, but for pages that a process maps.

        False, and nothing is dropped, without a file, unless `may_drop_pages`, and where the disk fails. Waits until
        the file is on the disk: the kernel drops no page that it has yet to write.
        """
        try:
            file = open_own(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            if _may_drop(file):
                os.fsync(file)
                os.setxattr(file, DROPPED_AT, str(int(time.time())).encode())
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                return True
        except (OSError, AttributeError):  # AttributeError: not on this system
            pass
        finally:
            os.close(file)
        return False

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


def _may_drop(file: int) -> bool:
    """See `CachedWeights.may_drop_pages`."""
    try:
        return not 0 <= time.time() - float(os.getxattr(file, DROPPED_AT)) < REREAD_INTERVAL_S
    except ValueError:
        return True
    except OSError as error:
        return error.errno == errno.ENODATA  # never dropped; otherwise there are no attributes here
    except AttributeError:  # not on this system
        return False


def _sync_directory(path: Path) -> None:
    """Makes a rename durable. Without it a power cut brings the old name back, which the digests tell."""
    with suppress(OSError):
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
