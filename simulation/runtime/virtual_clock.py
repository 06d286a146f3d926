"""A clock that jumps: an asyncio loop that never waits, and the engines' clock set to its time.

Used by `run` alone. Everything of a simulation runs in this one loop and this one thread, so a run is a function of
its scenario. Knows nothing of what runs in it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

CLOCK_PATHS = (
    "baton.engine.step_metrics.monotonic_s",
    "services.prefill.loop.monotonic_s",
    "services.prefill.server.monotonic_s",
    "services.decode.server.monotonic_s",
    "baton.worker.recent_attempts.monotonic_s",
    "services.decode.loop.monotonic_s",
    "services.decode.handoff_client.monotonic_s",
)
"""Where the engine loops, and who measures leases for them, read the time."""


TICK_S = 1e-7
"""What a turn of the loop takes: whoever asks again at once until it is time must see time pass."""


class Deadlock(Exception):
    """Everybody waits and nobody has a deadline: the simulated world has come to a standstill."""


class _VirtualSelector(selectors.BaseSelector):
    """Instead of waiting for a file, it lets the time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, int(fileobj), events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing is ready and nothing is due")
        self.now += max(TICK_S, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the next timer's. Work for other threads is done at once, in this one."""

    def __init__(self) -> None:
        self._virtual_selector = _VirtualSelector()
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._virtual_selector.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # the work's root: whoever awaits it hears of it
            done.set_exception(error)
        return done

    def _write_to_self(self) -> None:
        """There is no other thread to be woken from."""


@contextmanager
def patched_engine_clocks(clock: Callable[[], float]) -> Iterator[None]:
    """Inside, the engine loops' clock is `clock`."""
    with ExitStack() as stack:
        for name in CLOCK_PATHS:
            stack.enter_context(patch(name, clock))
        yield
