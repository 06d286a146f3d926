"""The bounded command queue of an engine thread, emptied at the top of every turn."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Command = TypeVar("Command")


class Mailbox(Generic[Command]):
    """Many writers, one reader. `try_put` may be refused (new work); `put` may not (aborts, completions, replies).

    Memory is bounded all the same: each request causes a bounded number of `put` calls.
    """

    def __init__(self, max_commands: int) -> None:
        self._max_commands = max_commands
        self._commands: deque[Command] = deque()
        self._arrived = threading.Condition()
        self._closed = False

    def try_put(self, command: Command) -> bool:
        """Adds new work. Returns False if the mailbox is full or closed."""
        with self._arrived:
            if self._closed or len(self._commands) >= self._max_commands:
                return False
            self._commands.append(command)
            self._arrived.notify()
            return True

    def put(self, command: Command) -> None:
        """Adds a command whose loss would leak. After `close` it is dropped: the engine has ended."""
        with self._arrived:
            if not self._closed:
                self._commands.append(command)
                self._arrived.notify()

    def take_all(self, timeout_s: float | None) -> list[Command]:
        """Removes and returns all commands, in order. If there are none, waits up to `timeout_s` (None: for ever)."""
        if timeout_s == 0.0 and not self._commands:  # as between any two steps; what comes now is the next turn's
            return []
        with self._arrived:
            if not self._commands and not self._closed:
                self._arrived.wait(timeout_s)
            commands = list(self._commands)
            self._commands.clear()
            return commands

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Wakes the reader; later commands are dropped. Idempotent."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
