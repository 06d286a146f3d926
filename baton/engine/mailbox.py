"""How the outside speaks to an engine thread: a bounded mailbox, emptied whole at the top of every turn."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Command = TypeVar("Command")


class Mailbox(Generic[Command]):
    """Many writers, one reader. `try_put` may be refused (new work); `put` may not (aborts, completions, answers).

    What is posted is bounded all the same: a bounded number of requests causes a bounded number of posts each.
    """

    def __init__(self, max_commands: int) -> None:
        self._max_commands = max_commands
        self._commands: deque[Command] = deque()
        self._arrived = threading.Condition()
        self._closed = False

    def try_put(self, command: Command) -> bool:
        """Puts new work in; False when the mailbox is full or closed."""
        with self._arrived:
            if self._closed or len(self._commands) >= self._max_commands:
                return False
            self._commands.append(command)
            self._arrived.notify()
            return True

    def put(self, command: Command) -> None:
        """Puts a command in whose loss would leak. After `close` it is dropped: there is no engine left to leak."""
        with self._arrived:
            if not self._closed:
                self._commands.append(command)
                self._arrived.notify()

    def take_all(self, timeout_s: float | None) -> list[Command]:
        """Everything that has arrived, in order; waits up to `timeout_s` (None: until something comes) if empty."""
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
        """Wakes the reader for the last time; idempotent."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
