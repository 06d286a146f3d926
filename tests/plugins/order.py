"""Order of the tests of a run: folders with long files first; in a file, tests without a cluster of the module first.

`conftest.py` calls it. Files keep their order in a folder, and tests theirs among those of their kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

FIRST_FOLDERS = ("integration", "exactness", "chaos", "simulation", "service", "fuzz")
"""The folders with the longest files. `make test` hands out files in order, so that no long one begins last."""


def put_in_order(items: list[pytest.Item], tests: Path) -> None:
    """Sorts `items` in place. `tests`: the folder whose folders have an order.

    A module's fixture that yields keeps something running, mostly a cluster, until the module's last test. It would use
    the processor beside tests that have nothing to do with it, so these come first.
    """
    places: dict[Path, int] = {}
    for item in items:
        places.setdefault(item.path, len(places))
    items.sort(key=lambda item: (_folder_rank(item.path, tests), places[item.path], _keeps_something_running(item)))


def _folder_rank(path: Path, tests: Path) -> int:
    folder = path.relative_to(tests).parts[0]
    return FIRST_FOLDERS.index(folder) if folder in FIRST_FOLDERS else len(FIRST_FOLDERS)


def _keeps_something_running(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(found[-1].scope == "module" and _yields(found[-1].func) for found in fixtures)


def _yields(function: Callable[..., object]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
