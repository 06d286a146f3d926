"""The `baton` program: starts what takes longest before it imports the rest.

`baton up` needs a fork server that has imported PyTorch, and seconds pass until it has. So the fork server is started
before this process imports the command itself: the two import side by side.
"""

from __future__ import annotations

import importlib
import sys

from baton.services.cli.processes.fork_process import close_early, start_early

PROGRAM = "baton.services.cli.main"


def main() -> None:
    """The entry point of the `baton` script. Ends the process."""
    start_early(sys.argv[1:])
    try:
        importlib.import_module(PROGRAM).main()
    finally:
        close_early()


if __name__ == "__main__":
    main()
