"""The engine thread: turns a loop until its mailbox closes. Started and stopped by a service's `app`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from baton.telemetry.logs import get_logger

log = get_logger()


class EngineLoop(Protocol):
    """The one paragraph that both services write: take commands, schedule, run, commit, perform effects."""

    def turn(self) -> bool:
        """One pass; waits for commands when there is nothing to do. False when the mailbox has closed."""
        ...

    def close(self) -> None:
        """Wakes `turn` for the last time; may be called from any thread."""
        ...


class EngineThread:
    """Runs a loop. A loop that raises is broken: `on_crash` is called from the thread and the process must exit."""

    def __init__(self, loop: EngineLoop, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._on_crash = on_crash
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Closes the loop and waits; False when the step in progress outlasted `timeout_s`."""
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
