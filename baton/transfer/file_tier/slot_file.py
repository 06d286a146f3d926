"""Page-sized slots in preallocated segments of a directory that one worker has locked.

`DIRECTORY/FINGERPRINT/N/seg-0000 ...`, a folder N for each worker that uses the directory at once. Nothing is synced:
a page that a crash tears fails its digest.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from baton.domain.arithmetic import ceil_div

SEGMENT_BYTES = 256 * 1024 * 1024
MAX_WORKERS = 64
"""Folders tried for a lock."""


class FolderClaim:
    """The first folder below `root/fingerprint` that no living process has locked; made if it is missing."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        """Raises `OSError` if there is none, or one cannot be made."""
        base = root.expanduser() / fingerprint
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(MAX_WORKERS):
            self.path = base / str(number)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.path.chmod(0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                os.close(self._lock)
        raise OSError(errno.EBUSY, f"all {MAX_WORKERS} folders are locked", str(base))

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._lock)


class SlotFile:
    """Reads and writes whole slots by `preadv` and `pwrite`. Thread-safe for different slots."""

    def __init__(self, folder: Path, page_bytes: int, num_slots: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Segments behind `num_slots` are removed. Raises `OSError`."""
        self.page_bytes = page_bytes
        self.slots_per_segment = min(max(1, segment_bytes // page_bytes), max(1, num_slots))
        self._folder = folder
        self._segments: dict[int, int] = {}
        num_segments = ceil_div(num_slots, self.slots_per_segment)
        for path in folder.glob("seg-*"):
            if not path.name[4:].isdigit() or int(path.name[4:]) >= num_segments:
                path.unlink()

    @property
    def mover(self) -> str:
        """What moves the bytes, for logs."""
        return "preadv"

    def write(self, slot: int, page: bytes) -> None:
        """Writes a page into `slot`; makes and preallocates its segment. Raises `OSError`, ENOSPC if that fails."""
        segment, offset = self._place(slot)
        fd = self._segment(segment, grow=True)
        view = memoryview(page)
        while view:
            num_bytes = os.pwrite(fd, view, offset)
            view, offset = view[num_bytes:], offset + num_bytes

    def read(self, slot: int) -> bytearray:
        """Bytes of `slot`. Raises `OSError`, also where the segment is too short."""
        segment, offset = self._place(slot)
        fd = self._segment(segment, grow=False)
        page = bytearray(self.page_bytes)
        view = memoryview(page)
        while view:
            num_bytes = os.preadv(fd, [view], offset)
            if num_bytes == 0:
                raise OSError(errno.EIO, f"segment {segment} ends before slot {slot}")
            view, offset = view[num_bytes:], offset + num_bytes
        return page

    def read_all(self, slots: Sequence[int]) -> list[bytearray | None]:
        """Bytes of slots, None for those that cannot be read."""
        return [self._read_or_none(slot) for slot in slots]

    def first_slot_of_segment(self, slot: int) -> int:
        return slot - slot % self.slots_per_segment

    def close(self) -> None:
        for fd in self._segments.values():
            os.close(fd)
        self._segments.clear()

    def _read_or_none(self, slot: int) -> bytearray | None:
        try:
            return self.read(slot)
        except OSError:
            return None

    def _place(self, slot: int) -> tuple[int, int]:
        segment, index = divmod(slot, self.slots_per_segment)
        return segment, index * self.page_bytes

    def _segment(self, segment: int, *, grow: bool) -> int:
        fd = self._segments.get(segment)
        if fd is not None:
            return fd
        path = self._folder / f"seg-{segment:04d}"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if grow else 0), 0o600)
        num_bytes = self.slots_per_segment * self.page_bytes
        try:
            if grow and os.fstat(fd).st_size < num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            os.close(fd)
            raise OSError(errno.ENOSPC, f"{path.name} cannot be preallocated: {error.strerror}") from error
        if not grow and os.fstat(fd).st_size < num_bytes:
            os.close(fd)
            raise OSError(errno.EIO, f"{path.name} is shorter than it was made")
        return self._segments.setdefault(segment, fd)
