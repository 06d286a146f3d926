"""Settings of this process: cores and thread pools before torch is imported, garbage collection after start."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Collection, Mapping
from typing import NoReturn

from baton.settings.base import SettingsError

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

EXIT_UNWRITTEN = 120
"""Exit code where output could not be written, and there was no other failure."""


def usable_cores() -> list[int]:
    """Cores of this process, in order."""
    return sorted(os.sched_getaffinity(0))


def limit_cores(cores: Collection[int]) -> None:
    """Binds this process to `cores`. Raises `SettingsError` for a core that it may not use."""
    missing = sorted(set(cores) - set(usable_cores()))
    if missing:
        why = f"cores {missing} are not among those this process may use, {usable_cores()}"
        raise SettingsError("cpu_affinity", why=why, hint="Name other cores, or leave --cpu-affinity out.")
    os.sched_setaffinity(0, cores)


def limit_threads(threads: int) -> None:
    """Sizes the compute thread pools of this process; no effect on libraries that are already loaded."""
    os.environ.update(thread_variables(threads))


def thread_variables(threads: int) -> Mapping[str, str]:
    """Environment variables that size the thread pools of numeric libraries in a child process."""
    return {
        **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
        "TOKENIZERS_PARALLELISM": "false",
    }


MANY_YOUNG_OBJECTS = 10_000
"""For `freeze_gc` of a router: short requests have ended by then, and are not looked at again and again."""


def freeze_gc(num_young: int | None = None) -> None:
    """Exempts all present objects from garbage collection. Called once a service is built and loaded.

    Modules, weights and tables live until the end. With torch and transformers they are 400,000 objects; one
    collection of them stops every thread for several decode steps. `num_young`: objects made before the young ones
    are collected, instead of Python's 700. Memory that was freed meanwhile goes back to the system (`trim_heap`).
    """
    gc.collect()
    gc.freeze()
    trim_heap()
    if num_young is not None:
        gc.set_threshold(num_young, *gc.get_threshold()[1:])


def trim_heap() -> None:
    """Gives free memory of the C library's heaps back to the system, where the library can (glibc).

    What a start has freed lies between what stays, in the heaps of all its threads: packed weights' sources, and what
    tokenizers and configurations were read from. The library gives back only the ends of its heaps by itself.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def end_process(exit_code: int) -> NoReturn:
    """Ends this process, but leaves its objects to the kernel.

    Waits for threads that are not daemons, runs the exit handlers and flushes the standard streams, as a child of
    `multiprocessing` does. What interrupts that ends the process at once, with `exit_code`. Taking hundreds of
    thousands of objects of torch apart keeps a core busy for longer than all this, and a fork would copy their pages
    first.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is None or stream.closed:  # nobody asked for this output
                continue
            try:
                stream.flush()
            except OSError:  # its reader has gone
                exit_code = exit_code or EXIT_UNWRITTEN
    finally:
        os._exit(exit_code)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra` on top, for a child process."""
    return {**os.environ, **extra}
