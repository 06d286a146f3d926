"""A command that `Supervisor` starts, and the end of its log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """A command: a name, arguments (the program first), and variables on top of this environment.

    `words`: of the `baton serve` command that it is, so that it can be forked; none: another program. `stop_s`: most
    seconds between SIGTERM and SIGKILL, if others have more. `watched`: `Supervisor.first_exit` tells of its end.
    """

    name: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    words: tuple[str, ...] = ()
    stop_s: float = math.inf
    watched: bool = True


def log_tail(log: Path, num_lines: int = 15) -> str:
    """The last lines of a log; none of one that cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])
