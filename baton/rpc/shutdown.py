"""SIGTERM and SIGINT as an event that a service awaits. Called by every service's `serve`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def shutdown_event() -> Iterator[asyncio.Event]:
    """Yields an event that the first signal sets: drain. A second signal ends the process at once.

    For the running loop of the main thread. On exit those handlers are back that were
    installed before.
    """
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield event
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            if before[number] is not None:  # None: not installed by Python
                signal.signal(number, before[number])
