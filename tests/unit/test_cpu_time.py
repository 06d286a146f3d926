"""`tests/plugins/cpu_time.py`: the table has a file's CPU time, with its children's, in one process and in several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.plugins import cpu_time

cpu_time.MIN_SECONDS = 0.0

def pytest_configure(config):
    config.pluginmanager.register(cpu_time.CpuTimePlugin())
"""
BUSY_TEST = """
import subprocess, sys, time

def test_child():
    program = "import time\\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
"""
IDLE_TEST = "def test_nothing():\n    pass\n"


@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "--numprocesses=1", "--dist=loadfile")])
def test_the_file_whose_child_computes_is_above_the_idle_one(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for name, text in {"conftest.py": CONFTEST, "test_a.py": IDLE_TEST, "test_b.py": BUSY_TEST}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    completed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60.0, check=True
    )
    table = completed.stdout.partition("CPU time by file")[2]
    seconds = {line.split()[-1]: float(line.split()[0]) for line in table.splitlines()[1:4]}
    assert seconds["test_b.py"] >= 0.5
    assert seconds["test_b.py"] > seconds["test_a.py"]
    assert "(imports and collection)" in completed.stdout
    assert not any(name.startswith("=") for name in seconds)
