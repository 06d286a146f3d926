"""Ports for processes that are started next. No other process takes one before its owner listens.

A free port that the kernel names lies among the ephemeral ones, so any outgoing connection can take it before the
process that it is for, or while that process restarts.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections import deque
from pathlib import Path

LOCALHOST = "127.0.0.1"
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20_000
DEFAULT_EPHEMERAL = 32_768
MIN_CHOICE = 1_000
MAX_TRIES = 10_000
MAX_CLAIMS = 256
_claims: deque[int] = deque()  # file descriptors, open until the process ends


def free_ports(count: int) -> list[int]:
    """Different ports that nothing listens on, none of them ephemeral.

    A UDP socket of the same number claims each one until this process ends or has claimed 256 more: two callers of
    this function, in any processes of this host, are given different ports. Raises `OSError` if no port is free.
    """
    ports: list[int] = []
    below = _first_ephemeral()
    for _ in range(MAX_TRIES):
        if len(ports) == count:
            return ports
        # Where every port is ephemeral, the kernel chooses.
        port = random.randrange(FIRST_PORT, below) if below - FIRST_PORT >= MIN_CHOICE else 0
        if claimed := _claim(port):
            ports.append(claimed)
    raise OSError(errno.EADDRINUSE, f"no {count} free ports of {LOCALHOST} from {FIRST_PORT} to {below}")


def _claim(port: int) -> int:
    """The port, if it is free and claimed; else 0."""
    claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        with socket.socket() as probe:
            probe.bind((LOCALHOST, port))
            number = int(probe.getsockname()[1])
            claim.bind((LOCALHOST, number))
    except OSError:
        claim.close()
        return 0
    if len(_claims) == MAX_CLAIMS:
        os.close(_claims.popleft())
    _claims.append(claim.detach())
    return number


def _first_ephemeral() -> int:
    try:
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL
