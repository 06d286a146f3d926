"""Ports that are free stay free: for other processes that ask, and from outgoing connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.services.cli.processes import ports
from baton.services.cli.processes.ports import FIRST_PORT, LOCALHOST, free_ports


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The first ephemeral port, where few ports are to choose from."""
    monkeypatch.setattr(ports, "MIN_CHOICE", 1)
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", tmp_path / "range")
    (tmp_path / "range").write_text(f"{FIRST_PORT + 40}\t60999\n")
    claims = deque[int]()
    monkeypatch.setattr(ports, "_claims", claims)
    yield FIRST_PORT + 40
    for claim in claims:
        os.close(claim)


def test_they_differ_and_are_not_ephemeral(narrow: int) -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    assert all(FIRST_PORT <= port < narrow for port in found)


def test_the_oldest_claims_are_given_back(narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "MAX_CLAIMS", 5)
    assert len([port for _ in range(50) for port in free_ports(1)]) == 50


def test_another_process_is_given_other_ports(narrow: int) -> None:
    """Both ask before either listens."""
    program = (
        "import sys; from pathlib import Path; from baton.services.cli.processes import ports;"
        "ports.MIN_CHOICE, ports.EPHEMERAL_RANGE = 1, Path(sys.argv[1]); print(*ports.free_ports(10), flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(ports.EPHEMERAL_RANGE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = set(free_ports(10))
        other.communicate("", timeout=30.0)
    assert len(theirs) == 10
    assert not ours & theirs


def test_a_port_in_use_is_not_named(narrow: int) -> None:
    [port] = free_ports(1)
    with socket.create_server((LOCALHOST, port)):
        os.close(ports._claims.pop())
        assert port not in free_ports(15)


def test_none_free_is_an_error(narrow: int) -> None:
    with pytest.raises(OSError, match="no 41 free ports"):
        free_ports(41)


def test_the_kernel_chooses_where_all_ports_are_ephemeral(narrow: int) -> None:
    ports.EPHEMERAL_RANGE.write_text("1024\t65535\n")
    assert len(set(free_ports(5))) == 5


def test_an_unreadable_range_is_the_usual_one(narrow: int) -> None:
    ports.EPHEMERAL_RANGE.unlink()
    assert all(FIRST_PORT <= port < ports.DEFAULT_EPHEMERAL for port in free_ports(5))
