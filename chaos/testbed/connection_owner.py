"""Finds the process that made a TCP connection on this machine. Called by `network` at every accept.

A worker has one address for all callers. Knowing the caller lets one proxy treat a router's and a decode worker's
connections differently, so a link can break while other processes still reach both of its ends.

Netlink (sock_diag(7), one socket by its addresses) returns the connection's inode in microseconds. The tables of
/proc/net hold every connection of the machine, so reading them is slow under retries. /proc/<pid>/fd shows the owner of
an inode.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

Address = tuple[str, int]
"""IPv4 host and port. gRPC calls IPv4 addresses from IPv6 sockets; the kernel finds those too."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 20, 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, sender
_QUERY = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_ENDS = struct.Struct("!HH16s16s")  # own port, peer's port, own address, peer's address
_ANY_STATE, _NO_COOKIE = 0xFFFFFFFF, b"\xff" * 8
_INODE_OFFSET = _HEADER.size + 68  # in inet_diag_msg
_TIMEOUT_S = 1.0


def connection_owner(client: Address, server: Address, pids: Mapping[str, int]) -> str | None:
    """Name of the process in `pids` that owns the connection from `client` to `server`, or None."""
    inode = _inode_of(client, server)
    if inode is None:
        return None
    return next((name for name, pid in pids.items() if _has_open_file(pid, f"socket:[{inode}]")), None)


def _inode_of(client: Address, server: Address) -> int | None:
    """Inode of the client's end; None if it is closed."""
    ends = _ENDS.pack(client[1], server[1], _packed(client[0]), _packed(server[0]))
    body = _QUERY.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ANY_STATE) + ends + struct.pack("=I", 0) + _NO_COOKIE
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(head + body)
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    return int(struct.unpack_from("=I", answer, _INODE_OFFSET)[0]) or None


def _packed(host: str) -> bytes:
    return socket.inet_aton(host).ljust(16, b"\0")


def _has_open_file(pid: int, target: str) -> bool:
    """True if a process has this file open; False if it has ended."""
    try:
        entries = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False
    for entry in entries:
        try:
            if os.readlink(entry.path) == target:
                return True
        except OSError:  # closed meanwhile
            continue
    return False
