"""A lock between processes, held until it is closed or its process ends, however it ends.

`flock` has no timeout, so a thread waits in it. A waiter that gave up leaves a thread that frees the lock at once.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from baton.model.weight_file.ownership import open_own


class LockTimeout(Exception):
    """Another process still holds the lock at the deadline."""


class FileLock:
    """A lock of the file at `path`, which stays: exclusive, or shared with others that are."""

    def __init__(self, path: Path, *, shared: bool = False, create: bool = True) -> None:
        """Makes a missing file, with `create`.

        Raises `OSError`, or `ForeignFile` for a file that another user may write.
        """
        self._file = open_own(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._guard = threading.Lock()
        self._abandoned = False
        self._acquired = threading.Event()
        self._error: OSError | None = None

    def try_acquire(self) -> bool:
        """Takes the lock if it is free. Raises `OSError` where the file system has no locks."""
        try:
            fcntl.flock(self._file, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def acquire(self, timeout_s: float) -> None:
        """Waits for the lock. Raises `LockTimeout`, after which this object is closed, or `OSError`."""
        threading.Thread(target=self._wait, name="baton-weight-lock", daemon=True).start()
        if not self._acquired.wait(timeout_s):
            with self._guard:
                if not self._acquired.is_set():
                    self._abandoned = True
                    raise LockTimeout(f"another worker has packed them for more than {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Frees the lock."""
        if not self._abandoned:
            os.close(self._file)

    def _wait(self) -> None:
        try:
            fcntl.flock(self._file, self._kind)
        except OSError as error:
            self._error = error
        with self._guard:
            self._acquired.set()
            if self._abandoned:
                os.close(self._file)
