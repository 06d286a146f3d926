"""Touches the memory of a pool beside the start of its worker, so that no transfer waits for a first touch.

The kernel zeroes a page when it is touched first: seconds for a large pool, in which the worker may serve. Who uses a
page earlier touches it for itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from baton.engine.pool.memory_left import memory_left
from baton.engine.pool.pending import PendingPool
from baton.kv.memory import HUGE_PAGE_BYTES, PageMemory
from baton.telemetry.logs import get_logger

log = get_logger()

PAUSE_RATIO = 3.0
"""Pause after each page by the time that it took: others then map memory, and have the core."""


class TouchThread:
    """A thread that touches `memories` from their beginning. It pauses after each huge page, and ends at `close`."""

    def __init__(self, memories: Sequence[PageMemory], pending: PendingPool | None = None) -> None:
        """`pending`: the note of `memories`, which the thread closes."""
        self._memories = memories
        self._pending = pending
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._error: OSError | None = None
        self._on_failure: Callable[[BaseException], None] | None = None
        self.thread = threading.Thread(target=self._run, name="baton-pool-touch", daemon=True)

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """`call` gets the error if there is, or was, no memory; from the thread, or now. The process must then end."""
        with self._guard:
            self._on_failure, error = call, self._error
        if error is not None:
            call(error)

    def close(self) -> None:
        """Has the thread end after the page in progress."""
        self._closed.set()

    def _run(self) -> None:
        began, num_bytes = time.monotonic(), sum(memory.mapped_bytes for memory in self._memories)
        try:
            if not self._touch_all():
                return
        except OSError as error:
            hint = "Lower --kv-memory-mib or --num-pages, or stop other processes."
            log.error("pool_without_memory", bytes=num_bytes, why=str(error), hint=hint)
            with self._guard:
                self._error, call = error, self._on_failure
            if call is not None:
                call(error)
            return
        finally:
            if self._pending is not None:
                self._pending.close()
        log.info("pool_touched", bytes=num_bytes, seconds=round(time.monotonic() - began, 2))

    def _touch_all(self) -> bool:
        """One huge page a call: the call keeps others from mapping memory. False once closed."""
        for memory in self._memories:
            for start in range(0, memory.mapped_bytes, HUGE_PAGE_BYTES):
                began = time.monotonic()
                memory.populate(start, HUGE_PAGE_BYTES)
                if self._closed.wait(PAUSE_RATIO * (time.monotonic() - began)):
                    return False
        return True


def touch_beside(memories: Sequence[PageMemory]) -> TouchThread | None:
    """Starts to touch `memories`, nothing of which is used yet.

    None where they are touched now: they may not fit what the host or the container has left beside the pools of
    others that are not touched yet, or the kernel cannot touch a page that is in use. Raises `OSError` if there is no
    memory for the beginning.
    """
    num_bytes = sum(memory.mapped_bytes for memory in memories)
    pending = PendingPool(num_bytes)
    try:
        left, others = memory_left(), pending.others()
        fits = left is None or num_bytes + others <= left
        if not fits:
            hint = "Lower --kv-memory-mib or --num-pages."
            log.warning("pool_may_not_fit", bytes=num_bytes, other_pools_bytes=others, left=left, hint=hint)
        if not fits or not all([memory.populate(0, HUGE_PAGE_BYTES) for memory in memories]):
            for memory in memories:
                memory.touch()
            pending.close()
            return None
        touch = TouchThread(memories, pending)
    except BaseException:
        pending.close()
        raise
    touch.thread.start()
    return touch
