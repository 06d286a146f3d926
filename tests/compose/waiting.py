"""Waiting with a deadline, for what a stack of containers shows over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx2


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls twice a second. Raises `TimeoutError`. A connection that fails counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except httpx2.TransportError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.5)  # poll interval
