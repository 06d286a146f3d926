"""The file by which a worker proves that its predecessor has ended, and takes its id over at once.

A worker holds the file's lock while its process lives, and writes its incarnation there. The kernel frees the lock when
the process ends, however that happens: whoever gets the lock knows that the incarnation in the file is no more. Its
record needs no watching then, and can be withdrawn when the successor serves.

The file lies beside the socket of a state store in a directory of this user alone, as `baton up` makes it: whoever
calls the store there is on this host. Workers with other stores have no such file. Called by `lifecycle`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from pathlib import Path

from baton.domain.ids import Incarnation, WorkerId
from baton.store.store import StoreUnavailable, WorkerRegistry
from baton.telemetry.logs import get_logger

log = get_logger()

UNIX = "unix://"
DIGEST_BYTES = 8
MAX_BYTES = 64


class IncarnationFile:
    """One worker's file. Used by nobody else while the process lives, if the lock could be taken."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it, for this user only, and tries to take its lock. Raises `OSError`."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_held = True
        except OSError:  # another process lives under this id, or there are no locks here
            self._is_held = False

    def ended(self) -> Incarnation | None:
        """The latest incarnation that held the file, which has ended; None if nobody did, or somebody does."""
        if not self._is_held:
            return None
        text = os.pread(self._file, MAX_BYTES, 0).decode("ascii", errors="replace").strip()
        return Incarnation(int(text)) if text.isdecimal() else None

    def note(self, incarnation: Incarnation) -> None:
        """Writes the incarnation of this process, before it is announced. No effect without the lock, or room."""
        if not self._is_held:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(incarnation).encode(), 0)

    def close(self) -> None:
        """Frees the lock: this process announces itself no more."""
        os.close(self._file)


def open_incarnation_file(store_url: str, id: WorkerId) -> IncarnationFile | None:
    """The file of a worker; None where the store is not reached by a socket in a directory of this user alone."""
    if not store_url.startswith(UNIX):
        return None
    directory = Path(store_url.removeprefix(UNIX).partition("?")[0]).parent
    name = hashlib.blake2b(id.encode(), digest_size=DIGEST_BYTES).hexdigest()
    try:
        found = directory.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            return None
        return IncarnationFile(directory / f"worker-{name}")
    except OSError:
        return None


async def withdraw_predecessor(registry: WorkerRegistry, id: WorkerId, file: IncarnationFile) -> None:
    """Withdraws the record of an ended process that had the file and the id; nothing else.

    To be called when the successor can be announced: until then routers learn of the end as of any other. Where the
    store does not answer, the record expires.
    """
    incarnation = file.ended()
    if incarnation is None:
        return
    log.info("predecessor_ended", worker=id, incarnation=incarnation)  # its record may have gone before
    with contextlib.suppress(StoreUnavailable):
        await registry.withdraw(id, incarnation)
