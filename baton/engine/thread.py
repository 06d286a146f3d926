"""The engine thread: runs a loop until its mailbox closes. Started and stopped by a service's `app`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from baton.telemetry.logs import get_logger

log = get_logger()


class EngineLoop(Protocol):
    """The loop of a service: take commands, schedule, run, commit, perform effects."""

    def turn(self) -> bool:
        """Runs one pass; waits for commands if there is no work. Returns False once the mailbox is closed."""
        ...

    def close(self) -> None:
        """Ends the loop after the current turn. May be called from any thread."""
        ...


class EngineThread:
    """Runs a loop. If the loop raises, `on_crash` is called from the thread and the process must exit."""

    def __init__(self, loop: EngineLoop, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._on_crash = on_crash
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Closes the loop and waits. Returns False if the step in progress outlasts `timeout_s`."""
        self._loop.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._loop.turn():
                pass
        except Exception as error:  # the thread's root: a broken invariant ends the process, leases do the rest
            log.error("engine_crashed", exc_info=True)
            self._on_crash(error)
