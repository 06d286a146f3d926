"""A simulated process: its tasks and its death. Created by `cluster`, known to the network.

A task's context holds its process, so tasks that the product starts belong to it too. A killed process runs on only to
unwind: its messages are dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from baton.domain.ids import Incarnation

_current_process: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar("process", default=None)

OnProcessCrash = Callable[["SimProcess", BaseException], None]


class SimProcess:
    """One life of one name; a restart is another `SimProcess`. `on_crash` receives errors of root tasks."""

    def __init__(self, name: str, incarnation: Incarnation, rng: Random, on_crash: OnProcessCrash) -> None:
        self.name = name
        self.incarnation = incarnation
        self.rng = rng
        self.alive = True
        self.frozen_until_s = 0.0
        self.hung_since_s = 0.0
        self.hung_until_s = 0.0
        self._on_crash = on_crash
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._context = contextvars.Context()
        self._context.run(_current_process.set, self)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` as one of the process's root tasks: if it fails, the process is broken."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, name=name, context=self._context.copy())
        task.add_done_callback(self._root_ended)
        return task

    def enter(self, work: Callable[[], None]) -> None:
        """Runs `work` as this process, at once."""
        self._context.copy().run(work)

    def hang(self, until_s: float) -> None:
        """Records that the engine's step lasts until then."""
        now = asyncio.get_running_loop().time()
        if now >= self.hung_until_s:
            self.hung_since_s = now
        self.hung_until_s = max(until_s, self.hung_until_s)

    async def wait_exited(self) -> None:
        """Waits until a killed process has unwound."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def tasks(self) -> list[str]:
        """Names of the running tasks."""
        return [task.get_name() for task in self._tasks if not task.done()]

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Registers a task of this process."""
        if not self.alive:
            task.cancel()
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def kill(self) -> None:
        """Kills the process; idempotent."""
        self.alive = False
        for task in list(self._tasks):
            task.cancel()

    def _root_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self.alive:
            self._on_crash(self, error)


def current_name() -> str:
    """The present process."""
    process = _current_process.get()
    return "world" if process is None else process.name


def task_factory(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    """Registers a new task with the process of its context. For `loop.set_task_factory`."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    owner = _current_process.get() if context is None else context.get(_current_process)
    if owner is not None:
        owner.add_task(task)
    return task
