"""The `baton` program: starts what takes longest as soon as it can.

`baton up` needs a fork server that has imported PyTorch, and seconds pass until it has. It is forked from this process
when that has imported the command, nearly all of which services import, too: so this is in memory once.

SIGTERM ends `baton up` as Ctrl-C does also while nothing waits for signals (`shutdown_event`): what it has made in the
temporary directory is removed, and a second signal does not interrupt that.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

from baton.services.cli.processes.fork_process import close_early, start_early, wants_early
from baton.services.cli.processes.interrupts import interrupted_once

PROGRAM = "baton.services.cli.main"
UP = "baton.services.cli.up"
"""What the program imports for `baton up`."""
EXIT_INTERRUPTED = 130
"""That of `baton.services.cli.errors`, whose import takes long."""


def main() -> None:
    """The entry point of the `baton` script. Ends the process."""
    try:
        with interrupted_once() if sys.argv[1:2] == ["up"] else contextlib.nullcontext():
            try:
                program = importlib.import_module(PROGRAM)
                if wants_early(sys.argv[1:]):
                    importlib.import_module(UP)
                    start_early(sys.argv[1:])
                program.main()
            finally:
                close_early()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
