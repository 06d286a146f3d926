"""Threads with stacks for recursive native code. llguidance's constructor calls itself once per rule that refers to the
next one, and an overflow of the stack kills the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

STACK_BYTES = 256 * 1024 * 1024
"""Address space; memory is used only as deep as a call goes. The deepest grammars found within `MAX_GRAMMAR_BYTES`
need more than 32 MiB and less than 64 MiB (llguidance 1.x on x86-64)."""

_start = threading.Lock()
_waited = threading.local()


class DeepThread(threading.Thread):
    """A thread with a stack of `STACK_BYTES`. The end of the process does not wait for it."""

    def __init__(self, call: Callable[[], object], name: str) -> None:
        super().__init__(target=call, name=name, daemon=True)

    def start(self) -> None:
        """The size is set for the whole process: a thread that another one starts meanwhile may get such a stack, too,
        which costs it nothing. Raises `RuntimeError` if the system has no room for a thread.
        """
        with _start:
            before = threading.stack_size(STACK_BYTES)
            try:
                super().start()
            finally:
                threading.stack_size(before)


def call_deep(call: Callable[[], _Result]) -> _Result:
    """Runs `call` in a `DeepThread`, this one if it is one, and waits for its end. Returns and raises as `call`."""
    if isinstance(threading.current_thread(), DeepThread):
        return call()
    results, errors, spent_s = list[_Result](), list[BaseException](), list[float]()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            spent_s.append(time.thread_time())

    thread = DeepThread(run, "deep-call")
    thread.start()
    thread.join()
    _waited.seconds = getattr(_waited, "seconds", 0.0) + spent_s[0]
    if errors:
        raise errors[0]
    return results[0]


def cpu_s() -> float:
    """CPU time of this thread, and of those in which its `call_deep` ran."""
    return time.thread_time() + float(getattr(_waited, "seconds", 0.0))
