"""`scripts/test.sh`: its status tells every failure, and an interrupt leaves no linter behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20.0
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a script that an interrupt ends, even where this process ignores interrupts, as in a shell's background."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with stand-ins for pytest and the linters; both succeed at once."""
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test.sh", tmp_path / "scripts")
    script(tmp_path / ".venv" / "bin" / "python", "exit 0")
    script(tmp_path / "scripts" / "lint.sh", "exit 0")
    return tmp_path


def script(path: Path, *lines: str) -> None:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)


def status(tree: Path) -> int:
    return subprocess.run([tree / "scripts" / "test.sh"], capture_output=True, timeout=TIMEOUT_S).returncode


@pytest.mark.parametrize(("tests", "lint", "expected"), [(0, 0, 0), (3, 0, 3), (0, 1, 1), (3, 1, 1)])
def test_the_status_is_zero_only_if_tests_and_linters_pass(tree: Path, tests: int, lint: int, expected: int):
    script(tree / ".venv" / "bin" / "python", f"exit {tests}")
    script(tree / "scripts" / "lint.sh", f"exit {lint}")
    assert status(tree) == expected


@pytest.mark.parametrize(("failing", "expected", "num_runs"), [(9, 0, 3), (1, 1, 1), (3, 1, 3)])
def test_late_tests_must_pass_three_times_alone(tree: Path, failing: int, expected: int, num_runs: int):
    """The stand-in for pytest writes what `tests/lateness.py` would write; run `failing` of those alone fails."""
    late = "tests/integration/test_a.py::test_b[x y]"
    first = f'[ $# -eq 2 ] && {{ echo "{late}" > "$LATE_TESTS_FILE"; exit 1; }}'
    again = f'[ "$3" = "{late}" ] || exit 3; echo run >> runs; [ "$(wc -l < runs)" != {failing} ]'
    script(tree / ".venv" / "bin" / "python", first, again)
    assert status(tree) == expected
    assert (tree / "runs").read_text() == num_runs * "run\n"


def test_a_failure_that_is_not_late_is_final(tree: Path):
    script(tree / ".venv" / "bin" / "python", 'echo run >> runs; : > "$LATE_TESTS_FILE"; exit 1')
    assert status(tree) == 1
    assert (tree / "runs").read_text() == "run\n"


def test_an_interrupt_ends_the_linters_too(tree: Path):
    ready, child = tree / "ready", tree / "linter"
    os.mkfifo(ready)
    script(tree / ".venv" / "bin" / "python", f"cat {child} > {ready}", "exec sleep 60")
    os.mkfifo(child)
    script(tree / "scripts" / "lint.sh", "sleep 60 &", f"echo $! > {child}", "wait")
    command = [sys.executable, "-c", INTERRUPTIBLE, str(tree / "scripts" / "test.sh")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as running:
        linter = int(ready.read_text())
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(TIMEOUT_S) == 128 + signal.SIGINT
    deadline = time.monotonic() + TIMEOUT_S
    while is_running(linter):
        assert time.monotonic() < deadline, "a linter was left behind"
        time.sleep(0.01)  # between two looks


def is_running(pid: int) -> bool:
    """False for a process that has ended, whether or not its parent has read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
