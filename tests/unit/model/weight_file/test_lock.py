"""One process packs; others wait with a deadline; a dead one's lock is free."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from baton.model.weight_file.lock import FileLock, LockTimeout

HOLDER = """
import sys
from pathlib import Path
from baton.model.weight_file.lock import FileLock
assert FileLock(Path(sys.argv[1])).try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "key.lock"


def test_a_held_lock_is_refused_and_a_closed_one_is_free(path: Path):
    first, second = FileLock(path), FileLock(path)
    assert first.try_acquire()
    assert not second.try_acquire()
    first.close()
    assert second.try_acquire()
    second.close()


def test_a_waiter_gets_the_lock_when_it_is_freed(path: Path):
    first, second = FileLock(path), FileLock(path)
    assert first.try_acquire()
    waiter = threading.Thread(target=second.acquire, args=(30.0,))
    waiter.start()
    first.close()
    waiter.join(30.0)
    assert not waiter.is_alive()
    third = FileLock(path)
    assert not third.try_acquire(), "the waiter holds it"
    second.close()
    assert third.try_acquire()
    third.close()


def test_a_waiter_gives_up_and_leaves_no_lock_behind(path: Path):
    first, second = FileLock(path), FileLock(path)
    assert first.try_acquire()
    with pytest.raises(LockTimeout, match=r"more than 0\.01 s"):
        second.acquire(0.01)
    second.close()
    first.close()
    third = FileLock(path)
    third.acquire(30.0)  # the abandoned thread may have it first, and frees it
    third.close()


def test_a_killed_holders_lock_is_taken_over(path: Path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = FileLock(path)
        assert not lock.try_acquire()
        holder.send_signal(signal.SIGKILL)
        lock.acquire(30.0)
        lock.close()
    finally:
        holder.kill()
        holder.communicate(timeout=10.0)


def test_shared_locks_exclude_an_exclusive_one_only(tmp_path: Path):
    path = tmp_path / "lock"
    alone, *readers = FileLock(path), FileLock(path, shared=True), FileLock(path, shared=True, create=False)
    assert [reader.try_acquire() for reader in readers] == [True, True]
    assert not alone.try_acquire()
    for reader in readers:
        reader.close()
    assert alone.try_acquire()
    alone.close()


def test_a_lock_that_is_not_to_be_made_is_missed(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "lock", create=False)
