"""Cores, threads and garbage collection of a process, tested in child processes."""

import subprocess
import sys

import pytest

from baton.settings.base import SettingsError
from baton.settings.process import child_environment, limit_cores, thread_variables, usable_cores


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
