"""What the fork server lets go of before it forks, and what it keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TIMEOUT_S = 120.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

COUNTS_CODE = """
import re
from pathlib import Path
import baton.services.router.app
from baton.services.cli.processes.fork_program import unmap_code

def resident_kib() -> int:
    smaps = Path("/proc/self/smaps").read_text()
    return sum(int(kib) for kib in re.findall(r" r-xp .* /.*\\n(?:[A-Z].*\\n)*?Rss: +(\\d+) kB", smaps))

before = resident_kib()
unmap_code()
print(before, resident_kib())
"""
CHANGES_CODE = """
import ctypes, mmap, sys
from baton.services.cli.processes.fork_program import unmap_code

with open(sys.argv[1], "r+b") as file:
    changed = mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
changed[0] = 7
address = ctypes.addressof(ctypes.c_char.from_buffer(changed))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0
unmap_code()
print(changed[0])
"""


def output_of(program: str, *words: str) -> list[int]:
    command = [sys.executable, "-c", program, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env={**os.environ})
    assert ended.returncode == 0, ended.stderr
    return [int(word) for word in ended.stdout.split()]


def test_code_that_imports_have_run_is_unmapped():
    before, after = output_of(COUNTS_CODE)
    assert after < before / 2


def test_changed_code_stays(tmp_path):
    """As that of a function that a library or a debugger has patched: the file has the old one."""
    (tmp_path / "code").write_bytes(bytes(1 << 16))
    assert output_of(CHANGES_CODE, str(tmp_path / "code")) == [7]
