"""What cache directories hold, and which of it no process uses: files of ready weights, and builds of kernels.

A file is in use while a process maps it, as the kernel lists it. Processes of other PID namespaces do not show; they
keep a mapped file that is removed. Imports no torch, so that a machine with a router alone can look, too.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.model.kernels.build import BUILT_DIR, SUFFIX_INDEX, build_specs, is_current
from baton.model.weight_file.lock import FileLock
from baton.model.weight_file.ownership import ForeignFile

WEIGHTS, UNFINISHED = ".weights", ".tmp"
"""What the names of ready and of unfinished files end with."""
EXPIRY_S = 14 * 24 * 3600.0
"""Files that nobody opened for so long may go."""
_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ (\d+)\s+(/.+?)(?: \(deleted\))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One thing that a cache holds. `age_s`: since it was written, or opened (weights). `users`: processes that map it.

    `kind`: weights, unfinished weights, kernels (current or not), or an unfinished build of kernels.
    """

    path: Path
    kind: str
    num_bytes: int
    age_s: float
    users: tuple[int, ...]
    is_current: bool = False


def weight_entries(directory: Path, now: float, proc: Path = Path("/proc")) -> list[CacheEntry]:
    """Files of weights in a directory, oldest first; none if it is missing. Raises `OSError` if it cannot be read."""
    kinds = {WEIGHTS: "weights", UNFINISHED: "unfinished weights"}
    return _entries(directory, lambda path: kinds.get(path.suffix), now, proc)


def kernel_entries(now: float, directory: Path = BUILT_DIR, proc: Path = Path("/proc")) -> list[CacheEntry]:
    """Kernel libraries and what killed builds left, oldest first. Those of the present sources are `is_current`."""
    current = {spec.path.name for spec in (*build_specs(), SUFFIX_INDEX) if is_current(spec)}

    def kind(path: Path) -> str | None:
        if path.suffix == ".so":
            return "kernels"
        return "unfinished kernels" if path.is_dir() and path.name.startswith("tmp") else None

    return _entries(directory, kind, now, proc, current if directory == BUILT_DIR else set())


def removable(entry: CacheEntry, older_than_s: float) -> bool:
    """True for what no process maps, that is old enough, and that no present code would open."""
    return not entry.users and not entry.is_current and entry.age_s >= older_than_s


def remove(entry: CacheEntry) -> bool:
    """Removes an entry; False if it stays: it is being written, or another user's. Raises `OSError`."""
    if entry.path.is_dir():
        shutil.rmtree(entry.path)
        return True
    if entry.kind != "unfinished weights":
        entry.path.unlink(missing_ok=True)
        return True
    try:
        lock = FileLock(entry.path.with_suffix(".lock"))
    except ForeignFile:
        return False
    try:
        if not lock.try_acquire():
            return False
        entry.path.unlink(missing_ok=True)
        return True
    finally:
        lock.close()


def _entries(
    directory: Path, kind: Callable[[Path], str | None], now: float, proc: Path, current: Set[str] = frozenset()
) -> list[CacheEntry]:
    users = _mapping_processes(proc)
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        named = kind(path)
        with suppress(FileNotFoundError):  # removed meanwhile
            status = path.lstat()
            if named is None or stat.S_ISLNK(status.st_mode):
                continue
            num_bytes = status.st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*"))
            who = tuple(sorted(users.get((status.st_ino, path.name), ())))
            age_s = max(0.0, now - status.st_mtime)
            found.append(CacheEntry(path, named, num_bytes, age_s, who, path.name in current))
    return sorted(found, key=lambda entry: -entry.age_s)


def _mapping_processes(proc: Path) -> dict[tuple[int, str], set[int]]:
    """(inode, file name) -> processes that map it. Device numbers of overlay file systems differ, so names decide."""
    users: dict[tuple[int, str], set[int]] = {}
    for process in _processes(proc):
        try:
            maps = (process / "maps").read_text(errors="replace")
        except OSError:  # it has ended, or is another user's, who can map no file of ours
            continue
        for inode, path in _MAPPED.findall(maps):
            users.setdefault((int(inode), os.path.basename(path)), set()).add(int(process.name))
    return users


def _processes(proc: Path) -> Iterator[Path]:
    yield from (path for path in proc.iterdir() if path.name.isdigit())
