"""The `baton` program: starts what takes longest before it imports the rest.

`baton up` needs a fork server that has imported PyTorch, and seconds pass until it has. So the fork server is started
before this process imports the command itself: the two import side by side.

SIGTERM ends `baton up` as Ctrl-C does also while nothing waits for signals (`shutdown_event`): what it has made in the
temporary directory is removed.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from baton.services.cli.processes.fork_process import close_early, start_early

PROGRAM = "baton.services.cli.main"
EXIT_INTERRUPTED = 130
"""That of `baton.services.cli.errors`, whose import takes long."""


def main() -> None:
    """The entry point of the `baton` script. Ends the process."""
    try:
        with _interrupted_by_sigterm(sys.argv[1:]):
            try:
                start_early(sys.argv[1:])
                importlib.import_module(PROGRAM).main()
            finally:
                close_early()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def _interrupted_by_sigterm(words: Sequence[str]) -> Iterator[None]:
    """Within the context SIGTERM raises `KeyboardInterrupt` if `words` are those of `baton up`. On the main thread."""
    if words[:1] != ["up"]:
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


if __name__ == "__main__":
    main()
