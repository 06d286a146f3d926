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
    "baton.services.prefill.loop.monotonic_s",
    "baton.services.prefill.server.monotonic_s",
    "baton.services.decode.serving.attempts.monotonic_s",
    "baton.worker.recent_attempts.monotonic_s",
    "baton.services.decode.loop.monotonic_s",
    "baton.worker.handoff.handoff_calls.monotonic_s",
    "baton.services.encode.loop.monotonic_s",
)
"""Modules in which engine loops and leases read the time."""


TICK_S = 1e-7
"""Duration of a turn of the loop, so that a busy loop sees time pass."""


class Deadlock(Exception):
    """All tasks wait without a deadline."""


class _VirtualSelector(selectors.BaseSelector):
    """A selector that advances time instead of waiting."""

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
    """An event loop whose time jumps to the next timer. Work for other threads runs at once, in this one."""

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
        except Exception as error:  # the work's root: the error goes to its awaiter
            done.set_exception(error)
        return done

    def _write_to_self(self) -> None:
        """Does nothing: there is no other thread."""


@contextmanager
def patched_engine_clocks(clock: Callable[[], float]) -> Iterator[None]:
    """Context in which the engine loops' clock is `clock`."""
    with ExitStack() as stack:
        for name in CLOCK_PATHS:
            stack.enter_context(patch(name, clock))
        yield
