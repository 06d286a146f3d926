"""Opens files that only this user can have written. Another user's weights would be this worker's answers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


class ForeignFile(Exception):
    """Another user may write a file or directory. The message says which, to end a sentence."""


def own_directory(path: Path) -> None:
    """Makes the directory if it is missing. Raises `ForeignFile` or `OSError`."""
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    _require_own(os.lstat(path), path, stat.S_ISDIR)


def open_own(path: Path, flags: int) -> int:
    """Opens a regular file of this user's; links are not followed. Raises `ForeignFile` or `OSError`.

    The open file is checked, not its name, so nobody can exchange it meanwhile.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    try:
        _require_own(os.fstat(file), path, stat.S_ISREG)
    except ForeignFile:
        os.close(file)
        raise
    return file


def _require_own(found: os.stat_result, path: Path, has_kind: object) -> None:
    assert callable(has_kind)
    if not has_kind(found.st_mode):
        raise ForeignFile(f"{path} is a link or of another kind")
    if found.st_uid != os.geteuid():
        raise ForeignFile(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & OTHERS_MAY_WRITE:
        raise ForeignFile(f"other users may write {path} (mode {stat.S_IMODE(found.st_mode):o})")
