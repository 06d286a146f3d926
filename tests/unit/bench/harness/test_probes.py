"""Probes of processes: a tree's members and its memory."""

import os
import subprocess
import sys

from bench.harness.probes import process_tree, tree_pss_bytes

TOUCHED = 32 << 20
CHILD = f"held = b'x' * {TOUCHED}; print('held', flush=True); input()"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_tree_has_grandchildren_and_their_memory():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        tree, num_bytes, alone = process_tree(process.pid), tree_pss_bytes(process.pid), tree_pss_bytes(grandchild)
        process.stdin.close()  # which the grandchild shares: it ends
    assert tree == [process.pid, grandchild]
    assert os.getpid() not in tree
    assert num_bytes > alone > TOUCHED
