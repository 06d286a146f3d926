"""What the memory of `baton up` is: kinds of mappings, and the arithmetic of the table."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from bench.system.process_memory import MIB, name_of, read_mappings, read_process, report


def mapping(header: str, *, pss: int, own: int = 0, dirty: int = 0, flags: str = "rd wr") -> str:
    """One of `smaps`, sizes in KiB."""
    fields = f"Size: 8192 kB\nPss: {pss} kB\nPss_Dirty: {dirty} kB\nPrivate_Clean: 0 kB\nPrivate_Dirty: {own} kB\n"
    return f"{header}\n{fields}VmFlags: {flags} \n"


@pytest.mark.parametrize(
    ("header", "flags", "kinds"),
    [
        ("7f00-7f10 r--s 0 fd:01 7 /model/.baton/1a.weights", "rd sh", {"weights": 10}),
        ("7f00-7f10 rw-p 0 00:00 0 ", "rd wr hg", {"pool": 10}),
        ("7f00-7f10 rw-p 0 00:00 0 ", "rd wr", {"own": 6, "shared": 4}),
        ("7f00-7f10 rw-p 0 00:00 0     [heap]", "rd wr", {"own": 6, "shared": 4}),
        ("7f00-7f10 r-xp 0 fd:01 7 /lib/code.so", "rd ex", {"data": 3, "code": 7}),
        ("7f00-7f10 rw-s 0 00:01 7 /SYSV00000000 (deleted)", "rd wr sh", {"segments": 10}),
    ],
)
def test_a_mapping_is_of_one_kind(header, flags, kinds):
    [found] = read_mappings(mapping(header, pss=10, own=6, dirty=3, flags=flags))
    assert {kind: size // 1024 for kind, size in found.by_kind()} == kinds


def test_pages_of_all_processes_add_up():
    found = {
        "prefill": Counter(weights=50 * MIB, pool=512 * MIB, own=10 * MIB),
        "decode": Counter(weights=50 * MIB, pool=256 * MIB, shared=20 * MIB),
    }
    table = report(found).splitlines()
    assert table[-3].split(" | ")[1:] == ["100.0", "768.0", "20.0", "10.0", "0.0", "0.0", "0.0", "898.0 |"]
    assert table[-1].endswith(" 1.30")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("python", "-m", "baton.services.cli.main", "serve", "decode", "--port=0"), "decode"),
        (("python", "-m", "baton.services.cli.processes.fork_program"), "fork server"),
        (("/lib/redis-server", "unixsocket:/tmp/up/redis"), "Redis"),
        (("python", "-m", "baton.services.cli.entry", "up", "model"), "baton up"),
        (("/usr/bin/other", ""), "other"),
    ],
)
def test_a_process_is_named_by_its_arguments(arguments, name):
    assert name_of(arguments) == name


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_a_process_takes_is_its_own():
    """In a small process of its own: a large one may lose pages to swap between two readings."""
    program = f"import sys; input(); kept = b'1' * {64 * MIB}; print('kept', flush=True); sys.stdin.read()"
    command = [sys.executable, "-I", "-S", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = read_process(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "kept\n"
        grown = read_process(process.pid)["own"] - before["own"]
        process.stdin.close()
    assert 0.8 * 64 * MIB <= grown < 2 * 64 * MIB
