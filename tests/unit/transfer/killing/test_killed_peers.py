"""A killed process does not take the process at the other end of its reads along; proven with real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from baton.transfer.nixl_agent import nixl_available
from tests.unit.transfer.killing.kill_pair import Case

NUM_KILLS = 2
GONE, SERVES = "failed: the source is gone", "serves"

pytestmark = pytest.mark.skipif(nixl_available() is not None, reason="NIXL is not installed")


@pytest.mark.parametrize(
    ("case", "transport", "outcome"),
    [
        (Case.SOURCE, "nixl-tcp", GONE),
        (Case.STOPPED_SOURCE, "nixl-tcp", GONE),
        (Case.SOURCE, "nixl", GONE),
        (Case.READER, "nixl", SERVES),
        (Case.READER_OF_STOPPED, "nixl", SERVES),
    ],
)
def test_the_peer_of_a_killed_process_lives_on(case: Case, transport: str, outcome: str):
    """Not so for a source over TCP, which UCX may abort: docs/results/killed-peers.md."""
    command = [sys.executable, "-m", "tests.unit.transfer.killing.kill_pair", case.value, transport, str(NUM_KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    counts = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(counts[-1]) == {outcome: NUM_KILLS}
