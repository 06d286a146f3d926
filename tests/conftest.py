"""Hypothesis profiles, timeouts of asynchronous tests, and the order of folders, for all tests.

`make test` draws the same Hypothesis examples every time; `HYPOTHESIS_PROFILE=explore` draws new ones.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.exactness.answers import reference_answers
from tests.lateness import LatenessPlugin
from tests.plugins.cpu_time import CpuTimePlugin
from tests.plugins.garbage import GarbagePlugin
from tests.plugins.order import put_in_order

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

TESTS = Path(__file__).parent
TEST_TIMEOUT_S = 120.0
TIMEOUT_SHARE = 0.8
"""Share of a test's `timeout`, used where it is less. The timeout itself would not name the `await` that hangs."""


collect_ignore = ["clients"]  # `make test-clients`: their packages are not in .venv


def with_timeout(test: Callable[..., Awaitable[object]], timeout_s: float) -> Callable[..., Awaitable[object]]:
    """Wraps `test`: it raises TimeoutError at the `await` that still waits after `timeout_s`."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(timeout_s):
            await test(*args, **kwargs)

    return run


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LatenessPlugin(TESTS))
    config.pluginmanager.register(CpuTimePlugin())
    config.pluginmanager.register(GarbagePlugin())
    if not hasattr(config, "workerinput"):  # one cache for all processes of the run, and none of it in the user's
        cache = tempfile.TemporaryDirectory(prefix="baton-tests-")
        os.environ["XDG_CACHE_HOME"] = cache.name
        answers = Path(cache.name, "reference-answers")
        answers.mkdir()
        os.environ[reference_answers.FOLDER] = str(answers)
        config.add_cleanup(cache.cleanup)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            timeout_s = float(marker.args[0] if marker else config.getini("timeout"))
            item.obj = with_timeout(item.obj, min(TEST_TIMEOUT_S, TIMEOUT_SHARE * timeout_s))
    put_in_order(items, TESTS)
