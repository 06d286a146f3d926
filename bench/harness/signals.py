"""Ends an experiment in order: SIGTERM is taken as Ctrl-C is. Called at the bottom of every experiment's file.

Servers and workers are children in contexts, which stop them on the way out; without this SIGTERM would leave them
behind. What had been measured is in the run's file already (`bench.harness.rotations.ResultFile`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

EXIT_INTERRUPTED = 130


def run_command(main: Callable[[], None]) -> None:
    """Runs a command line. Exits with 130 when a signal ended it, after everything it started is gone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; the result file, if one was asked for, has every rotation that had ended", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Through the handler of SIGINT, which inside an event loop is the loop's own."""
    signal.raise_signal(signal.SIGINT)
