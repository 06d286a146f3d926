"""A clock that jumps: an asyncio loop that never waits, and the engines' clock set to its time.

Used by `run` alone. Everything of a simulation runs in this one loop and this one thread, so a run is a function of
its scenario. Knows nothing of what runs in it.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
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

MANY_TIMERS, CANCELLED_SHARE = 100, 0.5
"""Copied from `asyncio.base_events`: more cancelled timers of so many are removed at once."""


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
        self.advance(timeout)
        return []

    def advance(self, seconds: float | None) -> None:
        """Lets time pass. Raises `Deadlock` for None."""
        if seconds is None:
            raise Deadlock("nothing is ready and nothing is due")
        self.now += max(TICK_S, seconds)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class _VirtualTimer(asyncio.TimerHandle):
    """A timer that is only compared with others of its loop."""

    __slots__ = ()
    _when: float
    _scheduled: bool

    def __lt__(self, other: _VirtualTimer) -> bool:  # type: ignore[override]
        return self._when < other._when


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer. Work for other threads runs at once, in this one.

    `call_soon`, `call_at` and `_run_once` do what those of `asyncio` do, in the same order, but without sockets,
    other threads and the debug mode: they were a fifth of a run.
    """

    _scheduled: list[_VirtualTimer]
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _timer_cancelled_count: int
    _clock_resolution: float

    def __init__(self) -> None:
        self._virtual_selector = _VirtualSelector()
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._virtual_selector.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _VirtualTimer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def _run_once(self) -> None:
        """One turn: removes cancelled timers, lets time pass, and runs what is ready."""
        ready, scheduled = self._ready, self._without_cancelled()
        if ready or self._stopping:
            self._virtual_selector.advance(0.0)
        else:
            self._virtual_selector.advance(scheduled[0].when() - self.time() if scheduled else None)
        end_s = self._virtual_selector.now + self._clock_resolution
        while scheduled and scheduled[0]._when < end_s:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _without_cancelled(self) -> list[_VirtualTimer]:
        """The timers, the next one first. Removes cancelled ones: all if they are most of many, else the first."""
        scheduled = self._scheduled
        if len(scheduled) > MANY_TIMERS and self._timer_cancelled_count / len(scheduled) > CANCELLED_SHARE:
            for timer in scheduled:
                timer._scheduled = not timer._cancelled
            scheduled = self._scheduled = [timer for timer in scheduled if not timer._cancelled]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        return scheduled

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
