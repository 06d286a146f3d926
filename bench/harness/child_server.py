"""A server of a benchmark in a process of its own.

Such a module prints the port that it listens at on 127.0.0.1, and serves until its standard input ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

START_S = 60.0
STOP_S = 10.0


@contextlib.contextmanager
def child_server(module: str, *arguments: str, tree: Path | None = None) -> Iterator[tuple[str, int]]:
    """Runs `module`, of the checkout `tree`; yields its URL and process id.

    Raises `RuntimeError` if it has no port within `START_S`.
    """
    environment = None if tree is None else {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tree, env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            has_said, _, _ = select.select([process.stdout], [], [], START_S)
            port = process.stdout.readline().strip() if has_said else b""
            if not port:
                raise RuntimeError(f"{module} did not start")
            yield f"http://127.0.0.1:{int(port)}", process.pid
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
