"""Workers tell each other of pools that are not touched yet, as long as they live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.pool import pending
from baton.engine.pool.pending import PendingPool

HOLDER = """
import sys
from pathlib import Path
from baton.engine.pool import pending
pending.DIRECTORY = Path(sys.argv[1])
note = pending.PendingPool(3)
print("noted", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of this user's notes, which is not there yet."""
    monkeypatch.setattr(pending, "DIRECTORY", tmp_path)
    return tmp_path / f"baton-pools-{os.geteuid()}"


def test_every_worker_counts_the_pools_of_the_others(notes):
    pools = [PendingPool(num_bytes) for num_bytes in (5, 7, 2**40)]
    assert [pool.others() for pool in pools] == [7 + 2**40, 5 + 2**40, 12]
    pools[2].close()
    pools[2].close()
    assert [pool.others() for pool in pools] == [7, 5, 0]
    for pool in pools:
        pool.close()
    assert list(notes.iterdir()) == []


def test_a_killed_worker_is_counted_no_more(tmp_path, notes):
    own = PendingPool(1)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "noted\n"
        assert own.others() == 3
        process.kill()
    assert own.others() == 0
    assert len(list(notes.iterdir())) == 1, "only the own note is left"
    own.close()


def test_a_note_that_is_being_written_stays(notes):
    own = PendingPool(1)
    (notes / "7.new").touch()
    assert own.others() == 0
    assert (notes / "7.new").exists()
    own.close()


def test_nothing_is_noted_where_others_could_write(notes):
    notes.mkdir(mode=0o777)
    notes.chmod(0o770)
    pool, other = PendingPool(5), PendingPool(7)
    assert pool.others() == 0
    pool.close()
    other.close()
    assert list(notes.iterdir()) == []
