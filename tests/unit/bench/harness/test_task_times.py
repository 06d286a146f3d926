"""Times of threads from the scheduler's statistics, of a process that runs, and of one that has ended."""

import os
import subprocess
import sys
import threading

import pytest

from bench.harness.task_times import NS, TaskTimes, WatchedThreads, service_processes, steal_s, task_ids

SPIN = "import time\nwhile time.thread_time() < 0.05: pass\nprint(flush=True)\ninput()"


def test_a_thread_that_computes_has_run_times():
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        tasks = WatchedThreads.of([(process.pid, tid) for tid in task_ids(process.pid)])
        before = tasks.read()
        process.stdin.close()
        process.wait()
        after = tasks.read()
    assert before.run_s >= 0.05
    assert before.wait_s >= 0.0
    assert after == before  # ended threads keep their last times
    tasks.close()


def test_times_of_several_threads_are_summed():
    [own] = [tid for tid in task_ids(os.getpid()) if tid == threading.get_native_id()]
    one, twice = (WatchedThreads.of([(os.getpid(), own)] * count) for count in (1, 2))
    before, doubled, after = one.read(), twice.read(), one.read()
    assert 2 * before.run_s <= doubled.run_s <= 2 * after.run_s
    assert after.since(before) == TaskTimes(after.run_s - before.run_s, after.wait_s - before.wait_s)
    for tasks in (one, twice):
        tasks.close()


def test_an_unknown_thread_is_refused():
    with pytest.raises(FileNotFoundError):
        WatchedThreads.of([(os.getpid(), 1 << 30)])


def test_units():
    assert pytest.approx(1e-9) == NS
    assert steal_s() >= 0.0


def test_services_are_found_by_their_command_lines():
    service = [sys.executable, "-c", "input()", "serve", "decode", "--port", "1"]
    code = f"import subprocess, sys; one = subprocess.Popen({service}); print(one.pid, flush=True); one.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert service_processes(parent.pid) == {"decode": child}
        parent.stdin.close()
