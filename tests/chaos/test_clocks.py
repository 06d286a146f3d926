"""A child's wall clock jumps, its monotonic clock does not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.settings.process import child_environment
from chaos.testbed.clocks import ClockController

CHILD = "import time\nwhile input():\n    print(time.time(), time.monotonic(), flush=True)"


@pytest.fixture
def clocks(tmp_path: Path) -> ClockController:
    clocks = ClockController(tmp_path)
    if not clocks.available:
        pytest.skip("no C++ compiler")
    return clocks


def read_clocks(child: subprocess.Popen[str]) -> tuple[float, float]:
    """Distances of the child's wall clock and monotonic clock from ours, in seconds."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("now\n")
    child.stdin.flush()
    wall, monotonic = map(float, child.stdout.readline().split())
    return wall - time.time(), monotonic - time.monotonic()


def test_a_jump_moves_the_wall_clock_of_a_running_child_alone(clocks: ClockController):
    environment = child_environment(clocks.environment("worker"))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as child:
        distances = [read_clocks(child)]
        for seconds in (30.0, -30.0):
            clocks.jump("worker", seconds)
            distances.append(read_clocks(child))
        clocks.restore()
        distances.append(read_clocks(child))
        child.kill()
    assert [wall for wall, _ in distances] == pytest.approx([0.0, 30.0, -30.0, 0.0], abs=5.0)
    assert [monotonic for _, monotonic in distances] == pytest.approx([0.0] * 4, abs=5.0)


def test_an_unknown_process_has_no_clock_to_move(clocks: ClockController):
    with pytest.raises(KeyError):
        clocks.jump("stranger", 1.0)
