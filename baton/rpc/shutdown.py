"""SIGTERM and SIGINT as an event that a service awaits. Called by every service's `serve`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def shutdown_event(again: Callable[[], None] | None = None) -> Iterator[asyncio.Event]:
    """Yields an event that the first signal sets: drain. Each further one calls `again`; None: it ends the process.

    For the running loop of the main thread. On exit those handlers are back that were installed before. They get a
    signal that comes meanwhile.
    """
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if not event.is_set():
            event.set()
        elif again is not None:
            again()
        else:
            os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield event
    finally:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for a moment the default has no handler: the end
        try:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                if before[number] is not None:  # None: not installed by Python
                    signal.signal(number, before[number])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
