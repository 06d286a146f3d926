"""Handles SIGTERM like Ctrl-C. Every experiment runs its command line through it.

Context managers stop the servers and workers of an experiment; without this module SIGTERM would leave them running.
Finished rotations are already in the run's file (`bench.harness.rotations.ResultFile`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

EXIT_INTERRUPTED = 130


def run_command(main: Callable[[], None]) -> None:
    """Runs a command line. Exits with 130 after a signal, once all child processes have stopped."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes with it ignored
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; the result file, if one was given, has every finished rotation", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises SIGINT, whose handler inside an event loop is the loop's own."""
    signal.raise_signal(signal.SIGINT)
