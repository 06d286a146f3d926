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

# Less than pytest's own `timeout`, which can only say that the event loop had nothing to do: this one fails at the
# `await` that was never answered.
PATIENCE_S = 120.0


def impatient(test: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    """`test`, which fails with a TimeoutError where it still waits after PATIENCE_S."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test(*args, **kwargs)

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if drawn := getattr(item.obj, "hypothesis", None):  # each example has this long
            if inspect.iscoroutinefunction(drawn.inner_test):
                drawn.inner_test = impatient(drawn.inner_test)
        elif inspect.iscoroutinefunction(item.obj):
            item.obj = impatient(item.obj)
