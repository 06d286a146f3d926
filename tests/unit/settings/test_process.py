"""Cores, threads and garbage collection of a process, tested in child processes."""

import ctypes
import os
import subprocess
import sys

import pytest

from baton.settings.base import SettingsError
from baton.settings.process import EXIT_UNWRITTEN, child_environment, limit_cores, thread_variables, usable_cores


def test_a_missing_core_is_refused():
    with pytest.raises(SettingsError, match="100000"):
        limit_cores([100000])


def test_a_process_sets_its_cores_and_thread_pools():
    core = usable_cores()[-1]
    program = (
        "import os; from baton.settings.process import limit_cores, limit_threads;"
        f"limit_cores([{core}]); limit_threads(3);"
        "print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split("\n")[0] == f"{{{core}}} 3"


def test_a_child_inherits_the_environment_plus_extras(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    monkeypatch.setenv("SOMETHING", "kept")
    environment = child_environment(thread_variables(2))
    assert (environment["OMP_NUM_THREADS"], environment["SOMETHING"]) == ("2", "kept")


def test_frozen_objects_are_not_collected_and_later_garbage_is():
    program = (
        "import gc; from baton.settings.process import freeze_gc;"
        "kept = [[] for _ in range(1000)]; freeze_gc();"
        "print(any(one is kept[0] for one in gc.get_objects()), gc.get_freeze_count() > 1000);"
        "ring = []; ring.append(ring); del ring; print(gc.collect())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["False", "True", "1"]


def test_a_service_may_collect_young_objects_less_often():
    program = (
        "import gc; from baton.settings.process import freeze_gc; before = gc.get_threshold();"
        "freeze_gc(); print(gc.get_threshold() == before);"
        "freeze_gc(5000); print(gc.get_threshold() == (5000, *before[1:]))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["True", "True"]


def ended(program: str, *, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; from baton.settings.process import end_process; {program}"]
    environment = child_environment({"PYTHONUNBUFFERED": ""})  # what is written waits for the end
    return subprocess.run(
        command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )


def test_a_process_ends_without_taking_its_objects_apart():
    """Threads end first, then exit handlers run, and output is written; no object is finalized."""
    run = ended(
        "import atexit, threading\n"
        "class Kept:\n"
        "    def __del__(self): print('finalized', flush=True)\n"
        "kept, proceed = Kept(), threading.Event()\n"
        "def wait(): proceed.wait(30); print('thread')\n"
        "threading.Thread(target=wait).start()\n"
        "atexit.register(print, 'handler')\n"
        "threading._register_atexit(proceed.set)\n"  # as executors end their threads
        "end_process(7)"
    )
    assert (run.returncode, run.stdout.split(), run.stderr) == (7, ["thread", "handler"], "")


def test_a_process_without_a_reader_of_its_output_ends_as_failed():
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        assert ended("print('lost'); end_process(0)", stdout=write_end).returncode == EXIT_UNWRITTEN
        assert ended("print('lost'); end_process(5)", stdout=write_end).returncode == 5
    finally:
        os.close(write_end)


def test_a_stream_that_is_closed_is_no_failure():
    assert ended("sys.stdout.close(); end_process(0)").returncode == 0
    assert ended("sys.stdout = None; end_process(0)").returncode == 0, "as after `>&-`"


def test_an_interrupt_while_the_process_ends_changes_no_exit_code():
    interrupt = "import os, signal, threading; threading._register_atexit(os.kill, os.getpid(), signal.SIGINT)\n"
    assert ended(f"\n{interrupt}end_process(5)").returncode == 5


FREES_MEMORY = """
import ctypes
from pathlib import Path
from baton.settings.process import freeze_gc

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def touched() -> ctypes.c_void_p:
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64 * 1024)))
    ctypes.memset(block, 1, 64 * 1024)
    return block

before = resident_mib()
blocks = [touched() for _ in range(1024)]
for block in blocks[:-1]:  # the last one keeps the heap as large as it is
    libc.free(block)
full = resident_mib()
freeze_gc()
print(full - before, resident_mib() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_what_a_start_has_freed_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", FREES_MEMORY], capture_output=True, text=True, timeout=60, check=True)
    full, left = map(int, done.stdout.split())
    assert full >= 60, "otherwise this shows nothing"
    assert left <= 8
