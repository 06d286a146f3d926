"""What a process must fix: before torch is imported its cores and the size of its thread pools, then what stays.

Called by `services.cli.serve` first thing in a worker, and by every service once it is built. Touches only this
process.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Mapping

from baton.settings.base import SettingsError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def usable_cores() -> list[int]:
    """The cores this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def limit_cores(cores: Collection[int]) -> None:
    """Binds this process to `cores`. Raises `SettingsError` when the machine (or container) lacks one."""
    missing = sorted(set(cores) - set(usable_cores()))
    if missing:
        why = f"cores {missing} are not among those this process may use, {usable_cores()}"
        raise SettingsError("cpu_affinity", why=why, hint="Name other cores, or leave --cpu-affinity out.")
    os.sched_setaffinity(0, cores)


def limit_threads(threads: int) -> None:
    """Sets the size of compute thread pools for this process; has no effect on libraries already loaded."""
    os.environ.update(thread_variables(threads))


def thread_variables(threads: int) -> Mapping[str, str]:
    """Environment variables that size the thread pools of numeric libraries, for a child process."""
    return {
        **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
        "TOKENIZERS_PARALLELISM": "false",
    }


def freeze_gc() -> None:
    """Takes all objects there are out of the garbage collector's sight, once a service is built and loaded.

    Modules, weights and tables stay until the end. With torch and transformers they are 400,000 objects, and going
    through them stops every thread for as long as several decode steps take.
    """
    gc.collect()
    gc.freeze()


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra` on top, for a child process."""
    return {**os.environ, **extra}
