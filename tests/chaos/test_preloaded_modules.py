"""Forked services find everything imported: a cluster of tests starts in a second of CPU time, not in twenty."""

from __future__ import annotations

import os
import subprocess
import sys

LOADS_AFTER_THE_IMPORTS = """
import os, sys
from chaos.testbed.fork_server import CHECKPOINT_LOADING, SERVICES, preload
preload(("baton.services.cli.main", *SERVICES, *CHECKPOINT_LOADING))
before = set(sys.modules)
threads = len(os.listdir("/proc/self/task"))
from baton.bundled import MODEL_DIR
from baton.model.loading.kernel_choice import best_kernels
from baton.model.loading.loader import load_model
from baton.services.router.text.text_model import TextModel
load_model(MODEL_DIR)
TextModel.load(MODEL_DIR)
num_checks = best_kernels.cache_info().misses
imported = sorted(name for name in set(sys.modules) - before if name.startswith(("torch.", "transformers.")))
print(num_checks, threads, *imported)
"""


def test_a_child_imports_nothing_to_load_the_bundled_model() -> None:
    command = [sys.executable, "-c", LOADS_AFTER_THE_IMPORTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (ended.returncode, ended.stdout.split()) == (0, ["1", "1"]), ended.stderr
