"""Progress bars on a terminal; nothing elsewhere, where the log is enough."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

OnProgress = Callable[[int, int], None]
"""Called with (parts done, parts in all)."""


@contextmanager
def loading_progress(name: str) -> Iterator[OnProgress | None]:
    """A bar for loading `name` on standard error; yields None if that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("[bold]loading {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=1.0)
        yield lambda done, total: progress.update(task, completed=done, total=total)
