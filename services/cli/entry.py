"""The `baton` program: starts what takes longest before it imports the rest.

`baton up` needs a fork server that has imported PyTorch, and seconds pass until it has. So the fork server is started
before this process imports the command itself: the two import side by side.

SIGTERM ends `baton up` as Ctrl-C does also while nothing waits for signals (`shutdown_event`): what it has made in the
temporary directory is removed, and a second signal does not interrupt that.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

from baton.services.cli.processes.fork_process import close_early, start_early
from baton.services.cli.processes.interrupts import interrupted_once

PROGRAM = "baton.services.cli.main"
EXIT_INTERRUPTED = 130
"""That of `baton.services.cli.errors`, whose import takes long."""


def main() -> None:
    """The entry point of the `baton` script. Ends the process."""
    try:
        with interrupted_once() if sys.argv[1:2] == ["up"] else contextlib.nullcontext():
            try:
                start_early(sys.argv[1:])
                importlib.import_module(PROGRAM).main()
            finally:
                close_early()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
