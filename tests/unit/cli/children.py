"""What tests of supervised processes share: waits for their logs, and what the system shows of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.services.cli.processes.supervisor import Child

DEADLINE_S = 60.0


async def wait_for_log(child: Child, text: str) -> None:
    """Polls the log file; waits for the child's end between two reads."""

    async def look() -> None:
        while text not in child.log.read_text():
            done, _ = await asyncio.wait([child.exit], timeout=0.02)
            assert not done, child.log_tail()

    await asyncio.wait_for(look(), DEADLINE_S)


@contextmanager
def supervising_program(code: str, log_dir: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Runs `code`, which starts a child and prints its pid; gives the program and a pidfd of the child."""
    with subprocess.Popen([sys.executable, "-c", code, str(log_dir)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            yield parent, child
        finally:
            os.close(child)
            parent.kill()


def exists(pid: int) -> bool:
    """True until a process has been reaped."""
    return Path(f"/proc/{pid}").exists()


def fork_server_of(pid: int) -> int:
    """The fork server among the children of `pid`: the first, as its forks have its arguments for a moment.

    One that has just been started has no arguments while it becomes its program.
    """
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = [int(child) for child in children if b"fork_program" in Path(f"/proc/{child}/cmdline").read_bytes()]
        if found:
            return min(found)
        os.sched_yield()
    raise AssertionError(f"no child of {pid} is a fork server")
