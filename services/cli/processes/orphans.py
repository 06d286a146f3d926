"""Processes whose own parent has ended, and whose parent is now this process.

Called by `ServiceForkServer`, whose services become children of this process in this way, and by `Supervisor`, which
reaps the others: what a killed service has started, or a fork server that was killed while it forked. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose own parent ends. Raises `OSError` if refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap_strangers() -> None:
    """Reaps ended children that neither this process nor its fork server has started as a service. Never waits.

    They are in another process's group. What this process starts is in its own group or leads one, and so does a
    service. A child of a service that leads a group of its own is left.
    """
    own_group = os.getpgrp()
    with contextlib.suppress(FileNotFoundError):  # a kernel without this list
        for child in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # reaped meanwhile
                if os.getpgid(child) not in (own_group, child):
                    os.waitpid(child, os.WNOHANG)
