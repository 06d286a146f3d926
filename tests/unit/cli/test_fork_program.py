"""What the fork server lets go of before it forks, and what it keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.services.cli import main, serve
from baton.services.cli.processes.fork_program import read_command, release_code_pages, unchanged_code

TIMEOUT_S = 120.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

COUNTS_CODE = """
import re
from pathlib import Path
import baton.services.router.app
from baton.services.cli.processes.fork_program import release_code_pages

def resident_kib() -> int:
    smaps = Path("/proc/self/smaps").read_text()
    return sum(int(kib) for kib in re.findall(r" r-xp .* /.*\\n(?:[A-Z].*\\n)*?Rss: +(\\d+) kB", smaps))

before = resident_kib()
release_code_pages()
print(before, resident_kib())
"""
CHANGES_CODE = """
import ctypes, mmap, sys
from baton.services.cli.processes.fork_program import release_code_pages

with open(sys.argv[1], "r+b") as file:
    changed = mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
changed[0] = 7
address = ctypes.addressof(ctypes.c_char.from_buffer(changed))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0
release_code_pages()
print(changed[0])
"""
READS = """
import gc, sys
from baton.services.cli.processes.fork_program import read_command

gc.disable()
for reads in (1, 10, 100):
    for _ in range(reads):
        read_command(("serve", sys.argv[1]))
    print(gc.get_freeze_count())
"""


def output_of(program: str, *words: str) -> list[int]:
    command = [sys.executable, "-c", program, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env={**os.environ})
    assert ended.returncode == 0, ended.stderr
    return [int(word) for word in ended.stdout.split()]


def test_a_fork_runs_a_command_that_was_read_before_it(monkeypatch):
    """Reading it there would copy the pages of all classes of flags."""
    words = ("serve", "router", "--port=81")
    call = read_command(words).call
    monkeypatch.setattr(main, "build_app", lambda _: pytest.fail("read again"))
    monkeypatch.setattr(serve, "run_service", lambda name, settings: settings.port)
    assert call is not None
    assert main.run(words, call) == 81


def test_a_command_that_cannot_be_read_is_told_by_the_fork(capsys):
    words = ("serve", "router", "--nonsense=1")
    call = read_command(words).call
    assert capsys.readouterr() == ("", "")
    assert call is None
    assert main.run(words, call) == 2
    assert "--nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("service", ["router", "decode"])
def test_commands_that_were_read_leave_nothing(service):
    """The server of a service that is restarted again and again would grow for ever."""
    _, first, last = output_of(READS, service)
    assert last - first < 100, "one object a read"


def test_code_that_imports_have_run_is_unmapped():
    before, after = output_of(COUNTS_CODE)
    assert after < before / 2


def test_changed_code_stays(tmp_path):
    """As that of a function that a library or a debugger has patched: the file has the old one."""
    (tmp_path / "code").write_bytes(bytes(1 << 16))
    assert output_of(CHANGES_CODE, str(tmp_path / "code")) == [7]


def mapping(first: int, *, anonymous: int, swap: int, flags: str = "r-xp") -> str:
    """One of `/proc/self/smaps`, a page long, with KiB of pages of its own in memory and swapped out."""
    fields = f"Rss: 4 kB\nAnonymous: {anonymous} kB\nAnonHugePages: 0 kB\nSwap: {swap} kB\nSwapPss: 0 kB\n"
    return f"{first:x}-{first + 4096:x} {flags} 00000000 08:01 7 /lib/code.so\n{fields}VmFlags: rd ex\n"


def test_code_with_changed_pages_in_memory_or_swap_is_kept():
    changed = mapping(0x1000, anonymous=4, swap=0) + mapping(0x3000, anonymous=0, swap=4)
    data = mapping(0x5000, anonymous=0, swap=0, flags="r--p")
    unchanged = mapping(0x7000, anonymous=0, swap=0)
    assert unchanged_code(changed + data + unchanged) == [(0x7000, 0x8000)]


def test_unreadable_mappings_are_left_alone(monkeypatch):
    asked: list[Path] = []

    def refused(path: Path, **_: object) -> str:
        asked.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refused)
    release_code_pages()
    assert asked == [Path("/proc/self/smaps")]
