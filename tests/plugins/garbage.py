"""Garbage collection of a test process: none while tests are collected, and none of what exists by then.

Modules and collected tests live until the process ends. They are millions of objects, and every full collection would
visit them all.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

YOUNG_OBJECTS = 20_000
"""Objects that are made between two collections, as in sweeps of the simulation."""


class GarbagePlugin:
    """Pauses garbage collection while tests are collected, and then exempts all that exists from it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.set_threshold(YOUNG_OBJECTS)
            gc.enable()
