"""What all tests share: how Hypothesis looks for examples, and when an asynchronous test has waited long enough.

`make test` draws the same examples every time, so that a run that was green stays green; `HYPOTHESIS_PROFILE=explore`
looks for new ones.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

TEST_TIMEOUT_S = 120.0
TIMEOUT_SHARE = 0.8
"""Of a test's `timeout`, if that is less. It can only say that the event loop had nothing to do; this fails at the
`await` that was never answered."""


def with_timeout(test: Callable[..., Awaitable[object]], timeout_s: float) -> Callable[..., Awaitable[object]]:
    """`test`, which fails with a TimeoutError where it still waits after `timeout_s`."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(timeout_s):
            await test(*args, **kwargs)

    return run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            timeout_s = float(marker.args[0] if marker else config.getini("timeout"))
            item.obj = with_timeout(item.obj, min(TEST_TIMEOUT_S, TIMEOUT_SHARE * timeout_s))
