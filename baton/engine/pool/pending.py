"""Pools of this host that are not touched yet: memory that no measurement shows as used.

A worker notes the bytes of its pool in a file, which it locks until the pool has been touched. Whoever compares a pool
with free memory adds those of the others: two workers that start at once see the same free memory. The kernel frees the
lock when a process ends, and the next one removes its file.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

DIRECTORY = Path("/dev/shm")
"""Memory of this host, or of this container, as the pools are."""
_UNLOCKED = ".new"
_MAX_DIGITS = 20


class PendingPool:
    """The note of one pool. `others` and `close` do nothing where no note could be written."""

    def __init__(self, num_bytes: int) -> None:
        """Notes a pool of `num_bytes`."""
        self._file: int | None = None
        self._path: Path | None = None
        with suppress(OSError):
            self._note(_own_directory(), num_bytes)

    def _note(self, directory: Path, num_bytes: int) -> None:
        path = directory / f"{os.getpid()}-{id(self):x}"
        unlocked = path.with_suffix(_UNLOCKED)  # nobody takes it for one of an ended process before it is locked
        file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(file, str(num_bytes).encode())
            os.rename(unlocked, path)
        except OSError:
            os.close(file)
            unlocked.unlink(missing_ok=True)
            raise
        self._file, self._path = file, path

    def others(self) -> int:
        """Bytes of the pools that other workers of this user have noted. Removes notes of processes that have ended."""
        if self._path is None:
            return 0
        return sum(_bytes_of(path) for path in _notes(self._path.parent) if path != self._path)

    def close(self) -> None:
        """The pool has been touched, or is given up. Idempotent."""
        if self._file is not None and self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._file)
        self._file = self._path = None


def _own_directory() -> Path:
    """The directory of this user's notes. Raises `OSError` if somebody else could write there."""
    path = DIRECTORY / f"baton-pools-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} is not this user's alone")
    return path


def _notes(directory: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from [path for path in directory.iterdir() if path.suffix != _UNLOCKED]


def _bytes_of(path: Path) -> int:
    """Bytes of a pool that is not touched yet; 0, and its note is removed, if its process has ended."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it was touched meanwhile
        return 0
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(file, _MAX_DIGITS).decode("ascii", errors="replace")
        return int(text) if text.isdecimal() else 0
    except OSError:
        return 0
    else:
        path.unlink(missing_ok=True)
        return 0
    finally:
        os.close(file)
