"""Touches the memory of a pool beside the start of its worker, so that no transfer waits for a first touch.

The kernel zeroes a page when it is touched first: seconds for a large pool, in which the worker may serve. Who uses a
page earlier touches it for itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from baton.kv.memory import HUGE_PAGE_BYTES, PageMemory
from baton.telemetry.logs import get_logger

log = get_logger()

NICENESS = 19
"""Of the thread: everything else goes first."""


def touch_beside(memories: Sequence[PageMemory]) -> threading.Thread | None:
    """Starts a thread that touches `memories`, nothing of which is used yet, from their beginning.

    None where the kernel cannot touch a page that is in use: there they are touched now. Raises `OSError` if there is
    no memory for the beginning.
    """
    if not all([memory.populate(0, HUGE_PAGE_BYTES) for memory in memories]):
        for memory in memories:
            memory.touch()
        return None
    thread = threading.Thread(target=_touch, args=(memories,), name="baton-pool-touch", daemon=True)
    thread.start()
    return thread


def _touch(memories: Sequence[PageMemory]) -> None:
    """One huge page a call: the call keeps others from mapping memory."""
    with suppress(OSError, AttributeError):  # AttributeError: not on this system
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    began, num_bytes = time.monotonic(), sum(memory.mapped_bytes for memory in memories)
    try:
        for memory in memories:
            for start in range(0, memory.mapped_bytes, HUGE_PAGE_BYTES):
                memory.populate(start, HUGE_PAGE_BYTES)
    except OSError as error:
        log.warning("pool_not_touched", why=str(error))
        return
    log.info("pool_touched", bytes=num_bytes, seconds=round(time.monotonic() - began, 2))
