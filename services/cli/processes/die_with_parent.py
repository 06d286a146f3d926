"""Runs a command that dies with its parent: `python die_with_parent.py <parent pid> <command> [argument ...]`.

A script for `LocalRedis` and `Supervisor`, executed by path in a bare interpreter: standard library only. It requests
SIGTERM at the parent's death from the kernel and then becomes the command, so no process stands in between. A
`preexec_fn` could not do this: a child forked from a process with threads may only exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Has this process get a signal when its parent dies; ends it if that is dead. Raises `OSError` if refused."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before the request
        sys.exit(1)


def main(arguments: list[str]) -> None:
    """Replaces this process. Raises `OSError` when the kernel refuses or the command does not exist."""
    parent, command = int(arguments[0]), arguments[1:]
    end_with_parent(parent, signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
