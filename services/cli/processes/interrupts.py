"""SIGTERM and SIGINT of a command that has something to remove in the end. Standard library only.

`baton up` and its entry point use it while no event loop waits for signals (`shutdown_event`).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptHandler:
    """See `interrupted_once`."""

    def __init__(self) -> None:
        self._is_over = False

    def close(self) -> None:
        """From now on no signal has an effect: what is to be removed is removed whole."""
        self._is_over = True

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """The handler of both signals. Raises `KeyboardInterrupt` the first time."""
        if not self._is_over:
            self._is_over = True
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted_once() -> Iterator[InterruptHandler]:
    """Within the context the first SIGTERM or SIGINT raises `KeyboardInterrupt`, and later ones have no effect.

    The handlers of before are back after it. On the main thread. Programs that are started do not inherit them.
    """
    interrupts = InterruptHandler()
    before = {number: signal.signal(number, interrupts.handle) for number in SIGNALS}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
