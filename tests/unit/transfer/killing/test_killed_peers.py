"""A killed process does not take the process at the other end of its reads along; proven with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.transfer.nixl_agent import nixl_available
from chaos.testbed.fork_server import shared_fork_server
from tests.unit.transfer.killing.kill_pair import Case

PROGRAM = "tests.unit.transfer.killing.kill_pair"
NUM_KILLS = 2
TIMEOUT_S = 120.0
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
def test_the_peer_of_a_killed_process_lives_on(case: Case, transport: str, outcome: str, tmp_path: Path):
    """Not so for a source over TCP, which UCX may abort: docs/results/killed-peers.md."""
    log = tmp_path / "kill_pair.log"
    pair = shared_fork_server().spawn("kill_pair", [case.value, transport, str(NUM_KILLS)], log, program=PROGRAM)
    assert pair.wait(TIMEOUT_S) == 0, log.read_text()
    counts = [line for line in log.read_text().splitlines() if line.startswith("{")]
    assert json.loads(counts[-1]) == {outcome: NUM_KILLS}
